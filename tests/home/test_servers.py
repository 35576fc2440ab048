import psycopg
import redis


def test_each_test_gets_a_database_of_its_own(database_url, empty_database_url):
    assert database_url != empty_database_url
    with psycopg.connect(empty_database_url) as connection:
        tables = connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone()
    assert tables == (0,)


def test_redis_is_empty_at_the_start_of_a_test(redis_url):
    with redis.Redis.from_url(redis_url) as connection:
        assert connection.dbsize() == 0


def test_the_default_model_is_a_gguf_file(smollm2_gguf):
    assert smollm2_gguf.read_bytes()[:4] == b"GGUF"
