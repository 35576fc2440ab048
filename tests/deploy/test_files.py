"""The container files as files: valid, pinned, without secrets, and started in an order that can work."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.composefile import UnsetVariableError, in_order, interpolate, load

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
FILES = [ROOT / "compose.yaml", ROOT / "deploy/compose.gpu.yaml"]
SECRETS = {"POSTGRES_PASSWORD": "pg", "REDIS_PASSWORD": "rd", "PENNYWEIGHT_SECRET": "sc"}


def services():
    return in_order(load(ROOT / "compose.yaml", SECRETS)["services"])


def lasting():
    return [service for service in services() if not service.ends]


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_the_file_fits_the_compose_schema(file):
    command = [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_has_nothing_to_say_about_the_dockerfile():
    done = subprocess.run([BIN / "hadolint", ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_overlay_changes_only_services_that_exist():
    overlay = load(ROOT / "deploy/compose.gpu.yaml", SECRETS)
    assert set(overlay["services"]) <= set(load(ROOT / "compose.yaml", SECRETS)["services"])


@pytest.mark.parametrize("name", sorted(SECRETS))
@pytest.mark.parametrize("value", [None, ""])
def test_nothing_starts_without_a_secret_and_the_message_names_it(name, value):
    environment = {key: text for key, text in SECRETS.items() if key != name}
    if value is not None:
        environment[name] = value
    with pytest.raises(UnsetVariableError, match=rf"{name}: set {name} in .env"):
        load(ROOT / "compose.yaml", environment)


def test_the_way_to_the_login_and_back_follows_the_ports_that_were_chosen():
    chosen = {"PENNYWEIGHT_PORT": "9090", "PENNYWEIGHT_DASHBOARD_PORT": "9501"}
    for name, port in (("service", "9090:8080"), ("dashboard", "9501:8501")):
        service = load(ROOT / "compose.yaml", SECRETS | chosen)["services"][name]
        assert service["ports"] == [f"127.0.0.1:{port}"]
        assert service["environment"]["PENNYWEIGHT_API_URL"] == "http://127.0.0.1:9090"
        assert service["environment"]["PENNYWEIGHT_DASHBOARD_URL"] == "http://127.0.0.1:9501"
    behind = {"PENNYWEIGHT_API_URL": "https://api.example", "PENNYWEIGHT_PORT": "9090"}
    service = load(ROOT / "compose.yaml", SECRETS | behind)["services"]["dashboard"]
    assert service["environment"]["PENNYWEIGHT_API_URL"] == "https://api.example"


def test_the_example_environment_names_every_variable_and_no_secret():
    example = (ROOT / ".env.example").read_text()
    named = dict(re.findall(r"^#?([A-Z][A-Z0-9_]*)=(.*)$", example, re.MULTILINE))
    used = {name for file in FILES for name in re.findall(r"\$\{(\w+)", file.read_text())}
    assert set(named) == used
    assert {named[name] for name in SECRETS} == {""}


def test_the_images_are_pinned():
    for service in services():
        if not service.ours:
            assert re.search(r":\d", service.spec["image"]), service.spec["image"]
    (python,) = re.findall(r"^ARG PYTHON=(.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert re.fullmatch(r"3\.1[1-9]\.\d+-slim-\w+", python)


def test_every_lasting_service_has_a_health_check_and_time_to_drain():
    for service in lasting():
        assert service.spec["healthcheck"]["test"], service.name
        assert service.spec["restart"] == "unless-stopped"
        assert int(service.spec["stop_grace_period"].rstrip("s")) >= 30, service.name


def test_every_process_of_ours_starts_after_the_tables_and_the_keys_are_there():
    by_name = {service.name: service for service in services()}
    assert by_name["migrate"].needs == {"postgres": "service_healthy", "redis": "service_healthy"}
    assert by_name["bootstrap"].needs == {"migrate": "service_completed_successfully"}
    for service in lasting():
        if service.ours:
            assert service.needs == {"bootstrap": "service_completed_successfully"}, service.name


def test_processes_of_ours_run_without_root_and_write_only_to_their_volume():
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    for service in services():
        if service.ours:
            assert service.spec["read_only"], service.name
            assert service.spec["cap_drop"] == ["ALL"]
            assert "user" not in service.spec
            for volume in service.spec.get("volumes", []):
                assert volume == f"{service.name}:{service.spec['environment']['PENNYWEIGHT_HOME']}"


def test_ports_are_open_to_this_machine_only_unless_told():
    for environment, address in ((SECRETS, "127.0.0.1"), (SECRETS | {"PENNYWEIGHT_BIND": "0.0.0.0"}, "0.0.0.0")):
        found = load(ROOT / "compose.yaml", environment)["services"]
        ports = {name: spec["ports"] for name, spec in found.items() if "ports" in spec}
        assert ports == {"service": [f"{address}:8080:8080"], "dashboard": [f"{address}:8501:8501"]}


def test_every_volume_is_used_and_declared():
    file = load(ROOT / "compose.yaml", SECRETS)
    used = {volume.split(":")[0] for spec in file["services"].values() for volume in spec.get("volumes", [])}
    assert used == set(file["volumes"])


def test_what_is_copied_into_an_image_is_what_the_package_is_made_of():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    included = {line[1:] for line in ignored if line.startswith("!")}
    packages = {"billing", "dashboard", "engine", "migrations", "service"}
    files = {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "deploy/requirements.py"}
    assert included == packages | files
    assert ignored[1] == "*"


def test_the_images_install_the_extras_that_exist():
    printed = subprocess.run(
        [sys.executable, "deploy/requirements.py", "service", "dashboard", "engine"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\n")  # fmt: skip
    assert {"msgspec", "litestar", "streamlit", "torch"} <= set(printed)


def test_variables_are_filled_in_as_compose_does():
    environment = {"A": "a", "EMPTY": ""}
    assert interpolate("${A} ${B:-b} ${EMPTY:-e} ${EMPTY-e} $$x", environment) == "a b e  $x"
    assert interpolate("${B:-x${A:?}y${C:-z}}!", environment) == "xayz!"
    with pytest.raises(UnsetVariableError, match="EMPTY: say so"):
        interpolate("${EMPTY:?say so}", environment)


def test_redis_keeps_what_is_in_flight_and_evicts_nothing():
    command = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["redis"]["command"]
    settings = dict(zip(command[1::2], command[2::2], strict=True))
    assert settings["--appendonly"] == "yes"
    assert settings["--maxmemory-policy"] == "noeviction"
