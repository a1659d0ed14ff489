"""If the configured user of guest processes cannot be used, the error says which user would be
right."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys

import msgspec
import pytest
from tokenbus.clients.system.faults import SystemFault
from tokenbus.clients.system.up import check_guest_user
from tokenbus.protocol.guest_user import GuestUser
from tokenbus.protocol.settings import Settings

NOBODY = pwd.getpwnam("nobody")


@pytest.mark.skipif(os.getuid() != 0, reason="only root may change its user")
def test_root_may_use_another_user() -> None:
    assert GuestUser.named("nobody") == (NOBODY.pw_uid, NOBODY.pw_gid)


def test_an_unknown_user_is_refused() -> None:
    with pytest.raises(ValueError, match="no user 'absent' on this machine; make one with"):
        GuestUser.named("absent")


def test_the_user_of_the_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="is the user of the workers or root"):
        GuestUser.named(pwd.getpwuid(os.getuid()).pw_name)


@pytest.mark.skipif(os.getuid() != 0, reason="the test itself changes its user")
@pytest.mark.process
def test_a_process_without_the_rights_is_refused() -> None:
    code = """
import os
from tokenbus.protocol.guest_user import GuestUser
os.setresuid(12345, 12345, 12345)
try:
    GuestUser.named("nobody")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "it lacks CAP_KILL, CAP_SETGID, CAP_SETUID; start the system as root" in done.stdout


def test_a_system_without_guest_processes_is_refused() -> None:
    settings = Settings(guest_user="absent", guest_processes=0)
    with pytest.raises(SystemFault, match="if the setting guest_processes is above 0"):
        check_guest_user(settings)
    with pytest.raises(SystemFault, match="no user 'absent'"):
        check_guest_user(msgspec.structs.replace(settings, guest_processes=1))
