from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import text

from billing.bootstrap import FirstKeys, example_device_rate, example_price, first_keys, has_keys
from billing.database import open_database, transaction
from billing.keys import Scope, authenticate, revoke_key
from billing.prices import list_prices
from billing.rates import list_device_rates


def test_the_first_keys_work_and_are_made_once(database_url):
    engine = open_database(database_url)
    with transaction(engine) as connection:
        assert not has_keys(connection)
        keys = first_keys(connection)
    with transaction(engine) as connection:
        assert first_keys(connection, keys) == keys
        assert has_keys(connection)
        user, operator = authenticate(connection, keys.api_key), authenticate(connection, keys.admin_key)
        assert (user.tenant_name, user.scopes) == ("default", {Scope.INFERENCE})
        assert (operator.tenant_id, operator.scopes) == (None, {Scope.ADMIN})
        assert connection.scalar(text("SELECT count(*) FROM api_keys")) == 2
    engine.dispose()


def test_keys_of_another_database_are_replaced_and_a_revoked_one_is_not(database_url):
    engine = open_database(database_url)
    with transaction(engine) as connection:
        keys = first_keys(connection, FirstKeys(api_key="pw-elsewhere", admin_key="pw-elsewhere"))
        assert keys.api_key != "pw-elsewhere"
        revoke_key(connection, keys.api_key[:11], actor="test")
        assert first_keys(connection, keys) == keys
    engine.dispose()


def test_examples_are_marked_and_leave_what_is_set_alone(database_url):
    engine = open_database(database_url)
    with transaction(engine) as connection:
        assert example_price(connection, "m")
        assert example_device_rate(connection, "cpu")
        assert not example_price(connection, "m")
        assert not example_device_rate(connection, "cpu")
        (price,), (rate,) = list_prices(connection), list_device_rates(connection)
        assert price.example
        assert rate.example
    engine.dispose()


def test_two_processes_that_bootstrap_at_once_make_one_set_of_keys(database_url):
    engine = open_database(database_url)

    def bootstrap() -> bool:
        with transaction(engine) as connection:
            example_price(connection, "m")
            example_device_rate(connection, "cpu")
            if has_keys(connection):
                return False
            first_keys(connection)
            return True

    with ThreadPoolExecutor(4) as pool:
        made = [done.result() for done in [pool.submit(bootstrap) for _ in range(4)]]
    with transaction(engine) as connection:
        assert connection.scalar(text("SELECT count(*) FROM api_keys")) == 2
        assert connection.scalar(text("SELECT count(*) FROM tenants")) == 1
        assert (len(list_prices(connection)), len(list_device_rates(connection))) == (1, 1)
    engine.dispose()
    assert sorted(made) == [False, False, False, True]
