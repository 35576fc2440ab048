"""The spool loses nothing that a dead process had written and keeps nothing that was committed."""

import os
import signal
import subprocess
import sys
import textwrap

from engine.spool import Adopted, Spool, adopt


def taken(folder):
    records: list[Adopted] = []
    adopt(folder, records.append)
    return records


def test_a_dead_producers_records_are_adopted_once_and_in_order(tmp_path):
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(f"""
                import pathlib, time
                from engine.spool import Spool
                spool = Spool(pathlib.Path({str(tmp_path)!r}), "dead")
                for n in range(100):
                    spool.append(b"record %d" % n)
                spool.hold(b"a" * 16, b"held a")
                spool.hold(b"b" * 16, b"held b")
                spool.append(b"settled a", replaces=b"a" * 16)
                print("ready", flush=True)
                time.sleep(60)
            """),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    assert taken(tmp_path) == [], "a living producer keeps its file"
    child.send_signal(signal.SIGKILL)
    child.wait()
    records = taken(tmp_path)
    assert [r.payload for r in records] == [b"record %d" % n for n in range(100)] + [b"settled a", b"held b"]
    assert [r.held for r in records] == [False] * 101 + [True]
    assert taken(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_committed_records_are_forgotten_and_the_file_stays_small(tmp_path):
    spool = Spool(tmp_path, "p")
    for _ in range(40):
        numbers = [spool.append(os.urandom(1000)) for _ in range(100)]
        spool.commit(numbers[:-1])
    assert (tmp_path / "p.spool").stat().st_size < 2 << 20
    assert spool.uncommitted() == 40
    spool.close()
    assert len(taken(tmp_path)) >= 40


def test_a_torn_last_frame_is_dropped(tmp_path):
    spool = Spool(tmp_path, "p")
    spool.append(b"whole")
    spool.append(b"torn" * 100)
    spool.close()
    path = tmp_path / "p.spool"
    path.write_bytes(path.read_bytes()[:-7])
    assert [r.payload for r in taken(tmp_path)] == [b"whole"]


def test_a_clean_close_with_nothing_alive_leaves_no_file(tmp_path):
    spool = Spool(tmp_path, "p")
    spool.hold(b"k" * 16, b"admission")
    spool.commit([spool.append(b"settlement", replaces=b"k" * 16)])
    spool.close()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_tears_no_frame(tmp_path):
    code = f"""
        import pathlib, resource, signal
        from engine.spool import Spool
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        spool = Spool(pathlib.Path({str(tmp_path)!r}), "full")
        spool.append(b"before")
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        try:
            spool.append(b"too long" * 1000)
        except OSError:
            print("refused")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        spool.append(b"after")
        spool.close()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"
    assert [r.payload for r in taken(tmp_path)] == [b"before", b"after"]
