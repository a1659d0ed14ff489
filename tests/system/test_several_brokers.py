"""The addresses of several brokers, and the programs that supervisord runs for them."""

from __future__ import annotations

import pytest
from tokenbus.clients.system.conf import configuration
from tokenbus.protocol.endpoints import numbered
from tokenbus.protocol.settings import SettingError, Settings, environment, resolve


def settings(**given: object) -> Settings:
    return resolve(given, {}, {}, "")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("tcp://127.0.0.1:5555", "tcp://127.0.0.1:5565"),
        ("tcp://[::1]:5555", "tcp://[::1]:5565"),
        ("ipc:///run/back.sock", "ipc:///run/back-1.sock"),
        ("ipc:///run.d/back", "ipc:///run.d/back-1"),
    ],
)
def test_the_addresses_of_brokers_are_counted_from_the_first(first: str, second: str) -> None:
    assert (numbered(first, 0), numbered(first, 1)) == (first, second)


def test_each_broker_has_addresses_of_its_own() -> None:
    two = settings(brokers=2, front="tcp://127.0.0.1:7000", run_dir="/r")
    own = [two.of_broker(number) for number in (0, 1)]
    assert [one.front for one in own] == ["tcp://127.0.0.1:7000", "tcp://127.0.0.1:7010"]
    assert [one.back for one in own] == ["ipc:///r/back.sock", "ipc:///r/back-1.sock"]
    assert two.front_endpoint == "tcp://127.0.0.1:7000,tcp://127.0.0.1:7010"
    with pytest.raises(SettingError, match="broker 2 has no address"):
        two.of_broker(2)


def test_another_process_gets_the_same_addresses() -> None:
    two = settings(brokers=2, front="tcp://127.0.0.1:7000", back="tcp://127.0.0.1:7001")
    there = resolve({}, environment(two), {}, "")
    assert there.front_endpoint == two.front_endpoint
    assert there.back_endpoint == two.back_endpoint == "tcp://127.0.0.1:7001,tcp://127.0.0.1:7011"


def test_addresses_may_be_given_one_by_one() -> None:
    two = settings(brokers=2, front="tcp://127.0.0.1:1,tcp://127.0.0.1:9")
    assert two.of_broker(1).front == "tcp://127.0.0.1:9"


@pytest.mark.parametrize("front", ["tcp://a:1,tcp://b:2,tcp://c:3", "inproc://x"])
def test_addresses_that_do_not_fit_are_refused(front: str) -> None:
    with pytest.raises(SettingError):
        settings(brokers=2, front=front)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("gpu_workers", "two", "--gpu-workers: expected a whole number, not 'two'"),
        ("brokers", "0", "--brokers: expected a whole number of at least 1, not '0'"),
        ("drain_s", "0", "--drain-s: expected a number above 0.0, not '0'"),
        ("log_format", "xml", "--log-format: expected one of human, json, not 'xml'"),
    ],
)
def test_a_value_that_is_not_valid_is_refused_in_plain_words(
    name: str, value: str, says: str
) -> None:
    with pytest.raises(SettingError) as caught:
        settings(**{name: value})
    assert str(caught.value) == says


def test_one_broker_runs_as_ever() -> None:
    broker = configuration(Settings(), "python")["program:broker"]
    # A file such as json.py in the folder where the system was started is not imported.
    assert broker["command"].endswith(" -P -m tokenbus.broker")
    assert "process_name" not in broker
    assert broker["stdout_logfile"] == "%(here)s/log/%(program_name)s.log"


def test_several_brokers_have_numbers() -> None:
    broker = configuration(Settings(brokers=3), "python")["program:broker"]
    assert broker["command"].endswith("-m tokenbus.broker %(process_num)d")
    assert broker["numprocs"] == "3"
    assert broker["process_name"] == "%(program_name)s-%(process_num)d"
    assert broker["stdout_logfile"] == "%(here)s/log/%(program_name)s-%(process_num)d.log"
