"""What every other test relies on."""

import psycopg
import redis


def tables(url):
    with psycopg.connect(url) as connection:
        rows = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
    return {row[0] for row in rows}


def test_each_test_gets_a_database_of_its_own(database_url, empty_database_url):
    assert database_url != empty_database_url
    assert "requests" in tables(database_url)
    assert tables(empty_database_url) == set()


def test_redis_is_empty_at_the_start_of_a_test(redis_url):
    with redis.Redis.from_url(redis_url) as connection:
        assert connection.dbsize() == 0


def test_the_default_model_is_a_gguf_file(smollm2_gguf):
    assert smollm2_gguf.read_bytes()[:4] == b"GGUF"
