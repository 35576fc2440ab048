from pathlib import Path

import pytest

from engine.config import ConfigError, EngineConfig, WorkerConfig
from engine.threads import prepare_threads, usable_cores

NEEDED = {"PENNYWEIGHT_REDIS_URL": "redis://h", "PENNYWEIGHT_MODEL": "/models/tiny.Q4_1.gguf"}


def test_names_follow_from_the_model_where_they_are_not_said() -> None:
    config = WorkerConfig.from_environment(NEEDED)
    assert config.model_name == config.deployment == "tiny.Q4_1"
    assert config.name.endswith("/tiny.Q4_1")
    assert config.engine("cpu") == EngineConfig()
    assert config.engine("cuda").max_batch > config.engine("cpu").max_batch


def test_everything_can_be_said() -> None:
    said = {
        **NEEDED,
        "PENNYWEIGHT_MODEL_NAME": "m",
        "PENNYWEIGHT_DEPLOYMENT": "m-int8",
        "PENNYWEIGHT_DEVICE": "cuda:1",
        "PENNYWEIGHT_WORKER_NAME": "a/b",
        "PENNYWEIGHT_KV_TOKENS": "1000",
        "PENNYWEIGHT_MAX_BATCH": "8",
        "PENNYWEIGHT_STEP_TOKENS": "64",
        "PENNYWEIGHT_PREFIX_CACHE": "0",
        "PENNYWEIGHT_THREADS": "3",
        "PENNYWEIGHT_LEASE_S": "2.5",
        "PENNYWEIGHT_DRAIN_S": "1",
        "PENNYWEIGHT_METRICS_PORT": "9000",
    }
    config = WorkerConfig.from_environment(said)
    assert (config.model_name, config.deployment, config.device, config.name) == ("m", "m-int8", "cuda:1", "a/b")
    assert (config.kv_tokens, config.threads, config.lease_s, config.metrics_port) == (1000, 3, 2.5, 9000)
    assert (config.engine("cuda").max_batch, config.engine("cuda").step_tokens) == (8, 64)


def test_batch_and_step_fit_together_or_are_refused_at_once() -> None:
    config = WorkerConfig.from_environment({**NEEDED, "PENNYWEIGHT_MAX_BATCH": "1000"})
    assert config.engine("cpu").step_tokens == 1000
    config = WorkerConfig.from_environment({**NEEDED, "PENNYWEIGHT_STEP_TOKENS": "16"})
    assert config.engine("cuda").max_batch == 16
    with pytest.raises(ConfigError, match="PENNYWEIGHT_STEP_TOKENS"):
        WorkerConfig.from_environment({**NEEDED, "PENNYWEIGHT_STEP_TOKENS": "16", "PENNYWEIGHT_MAX_BATCH": "17"})


@pytest.mark.parametrize("name", ["MAX_BATCH", "STEP_TOKENS", "KV_TOKENS", "KV_MEMORY_MB", "THREADS", "METRICS_PORT"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "x", "1e3", "²"])
def test_what_is_no_whole_number_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"PENNYWEIGHT_{name}"):
        WorkerConfig.from_environment({**NEEDED, f"PENNYWEIGHT_{name}": value})


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
def test_what_is_no_time_is_named(value: str) -> None:
    with pytest.raises(ConfigError, match="PENNYWEIGHT_LEASE_S"):
        WorkerConfig.from_environment({**NEEDED, "PENNYWEIGHT_LEASE_S": value})


def test_two_hardware_threads_of_a_core_are_one_core_and_a_quota_counts(tmp_path: Path) -> None:
    for cpu in range(256):
        topology = tmp_path / f"cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}\n")
    quota = tmp_path / "cpu.max"
    everything = usable_cores(tmp_path / "none", quota)
    assert usable_cores(tmp_path, quota) == -(-everything // 2)
    quota.write_text("150000 100000\n")
    assert usable_cores(tmp_path / "none", quota) == min(2, everything)
    quota.write_text("max 100000\n")
    assert usable_cores(tmp_path / "none", quota) == everything


def test_what_the_user_set_for_openmp_stays() -> None:
    environment = {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "ACTIVE"}
    assert prepare_threads(None, environment) == 3
    assert environment == {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "ACTIVE"}
    fresh: dict[str, str] = {}
    assert prepare_threads(5, fresh) == 5
    assert fresh == {"OMP_NUM_THREADS": "5", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "200"}


@pytest.mark.parametrize(("value", "on"), [("", True), ("1", True), ("0", False)])
def test_the_prefix_cache_is_on_unless_switched_off(value: str, on: bool) -> None:
    config = WorkerConfig.from_environment({**NEEDED, "PENNYWEIGHT_PREFIX_CACHE": value})
    assert config.engine("cpu").prefix_cache is config.engine("cuda").prefix_cache is on


@pytest.mark.parametrize("value", ["no", "2", "true", " 0"])
def test_what_is_no_switch_is_named(value: str) -> None:
    with pytest.raises(ConfigError, match="PENNYWEIGHT_PREFIX_CACHE must be 1 or 0"):
        WorkerConfig.from_environment({**NEEDED, "PENNYWEIGHT_PREFIX_CACHE": value})
