"""The runtime in processes of its own: imports, warm starts, killed compiles, damaged caches."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from processes import python

SOFTMAX = """
    import sys, numpy as np, rudnn
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    y = rudnn.normalization.softmax_last_axis(x)
    assert np.allclose(y.sum(-1), 1) and np.allclose(y[0], y[2]), y
"""


def test_import_loads_no_compiler_and_no_framework() -> None:
    done = python("""
        import sys, rudnn
        print([m for m in ("tvm", "tvm_ffi", "torch", "networkx") if m in sys.modules])
    """)
    assert done.stdout.strip() == "[]", done.stderr


def test_second_process_runs_without_the_compiler(tmp_path) -> None:
    first = python(SOFTMAX + "    print('tvm' in sys.modules)\n", RUDNN_CACHE_DIR=str(tmp_path))
    second = python(SOFTMAX + "    print('tvm' in sys.modules)\n", RUDNN_CACHE_DIR=str(tmp_path))
    assert (first.stdout.strip(), second.stdout.strip()) == ("True", "False"), second.stderr


def test_without_a_c_compiler_everything_still_runs(tmp_path) -> None:
    done = python(SOFTMAX + "    print('ran')\n", RUDNN_CACHE_DIR=str(tmp_path), RUDNN_CC="none")
    assert done.stdout.strip() == "ran", done.stderr


def test_the_same_bits_on_any_number_of_threads() -> None:
    code = """
        import hashlib, numpy as np, rudnn
        rng = np.random.default_rng(0)
        x = rng.standard_normal((133, 257), np.float32)
        w = rng.standard_normal((65, 257), np.float32)
        g = np.ones(257, np.float32)
        n = rudnn.normalization
        made = [n.layer_norm(x, g), *n.layer_norm_backward(x, x, g), rudnn.nn.linear(x, w)]
        image, grid = x[:3, :256].reshape(3, 1, 16, 16), x[:3, :80].reshape(3, 5, 8, 2)
        made += [rudnn.pooling.max_pool(image, 3, 2, 1), rudnn.interpolation.interpolate(image, 33)]
        made += [rudnn.grid_sampling.grid_sample(image, grid)]
        print(hashlib.sha256(b"".join(m.tobytes() for m in made)).hexdigest())
    """
    hashes = {python(code, RUDNN_NUM_THREADS=n).stdout for n in ("1", "2", "3")}
    assert len(hashes) == 1 and hashes != {""}


def test_many_threads_compile_and_call_at_once(tmp_path) -> None:
    done = python("""
        import threading, numpy as np, rudnn
        errors = []
        def work(i):
            try:
                for k in range(12):
                    x = np.random.default_rng(i).standard_normal((5, 3 + k % 4), np.float32)
                    y = rudnn.normalization.softmax_last_axis(x)
                    assert np.allclose(y.sum(-1), 1, atol=1e-5)
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        [t.start() for t in threads]; [t.join() for t in threads]
        print(errors)
    """, RUDNN_CACHE_DIR=str(tmp_path))  # fmt: skip
    assert done.stdout.strip() == "[]", done.stderr


def test_many_processes_compile_the_same_kernel(tmp_path) -> None:
    env = os.environ | {"RUDNN_CACHE_DIR": str(tmp_path)}
    code = textwrap.dedent(SOFTMAX)
    runs = [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(4)]
    assert [run.wait(120) for run in runs] == [0, 0, 0, 0]


def test_killed_compiles_leave_a_cache_that_works(tmp_path) -> None:
    """SIGKILL at 50 moments spread over a cold compile."""
    env = os.environ | {"RUDNN_CACHE_DIR": str(tmp_path)}
    code = textwrap.dedent(SOFTMAX)
    python(SOFTMAX, RUDNN_CACHE_DIR=str(tmp_path / "other"))  # bytecode caches are warm
    # One long-lived process forks the victims after `import tvm`, so that kills hit the compile.
    killer = textwrap.dedent(f"""
        import os, random, signal, time, tvm, rudnn, rudnn.schedules.program
        import rudnn.runtime.targets.llvm.compile
        random.seed(1)
        died = 0
        for i in range(50):
            pid = os.fork()
            if pid == 0:
                exec({code!r})
                os._exit(0)
            time.sleep(random.uniform(0, 0.35))
            os.kill(pid, signal.SIGKILL)
            died += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
            if i % 5 == 4:
                from rudnn.runtime.compiler import disk_cache
                disk_cache().clear()
        print(died)
    """)
    done = subprocess.run([sys.executable, "-c", killer], env=env, capture_output=True, text=True)
    assert int(done.stdout) >= 10, (done.stdout, done.stderr)
    after = python(SOFTMAX, RUDNN_CACHE_DIR=str(tmp_path))
    assert after.returncode == 0, after.stderr


@pytest.mark.parametrize("damage", ["truncate", "garble", "empty"])
def test_damaged_cache_files_are_misses(tmp_path, damage: str) -> None:
    assert python(SOFTMAX, RUDNN_CACHE_DIR=str(tmp_path)).returncode == 0
    for path in [p for p in tmp_path.rglob("*") if p.is_file()]:
        content = path.read_bytes()
        middle = len(content) // 2
        changed = {
            "truncate": content[:middle],
            "garble": content[:middle] + bytes(b ^ 0x5A for b in content[middle:]),
            "empty": b"",
        }[damage]
        path.chmod(0o644)
        path.write_bytes(changed)
    done = python(SOFTMAX, RUDNN_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_interrupted_call_leaves_the_process_usable(tmp_path) -> None:
    done = python("""
        import os, signal, sys, numpy as np, rudnn
        # A shell has what it runs in the background ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sent = []
        def at_import(event, args):  # in the midst of TVM's import, where it has to wait
            if event == "import" and args[0].startswith("tvm.") and not sent:
                sent.append(args[0])
                os.kill(os.getpid(), signal.SIGINT)
        sys.addaudithook(at_import)
        x = np.random.default_rng(0).standard_normal((7, 19), np.float32)
        try:
            rudnn.normalization.softmax_last_axis(x)
        except KeyboardInterrupt:
            assert sent
        else:
            raise AssertionError("not interrupted")
        assert np.allclose(rudnn.normalization.softmax_last_axis(x).sum(-1), 1, atol=1e-5)
        print("fine")
    """, RUDNN_CACHE_DIR=str(tmp_path))  # fmt: skip
    assert done.stdout.strip() == "fine", done.stderr
