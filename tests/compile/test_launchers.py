"""What launches a kernel is in Triton's cache before the first launch, where this Triton has a compiler build it."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sonoro.compile import launchers
from sonoro.compile.launchers import build_launcher

triton = pytest.importorskip("triton")

SOURCE = """
#include <Python.h>
int cuInit(unsigned int flags);
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "__launcher", NULL, -1, NULL};
PyMODINIT_FUNC PyInit___launcher(void) { cuInit(0); return PyModule_Create(&definition); }
"""


class OldDriver:
    """As Triton's until 3.6: it links what it has compiled with the library of a GPU, if that is there."""

    def __init__(self) -> None:
        self.built: list[str] = []

    def make_launcher(self) -> str:
        return SOURCE

    def library_dirs(self) -> list[str]:
        folder = triton.knobs.nvidia.libcuda_path
        assert folder, "libcuda.so cannot found!"
        return [folder]

    def CudaLauncher(self, source: str, metadata: object) -> Any:  # noqa: N802 (as Triton calls it)
        self.built.append(source)
        libraries = {"library_dirs": self.library_dirs(), "libraries": ["libcuda.so.1"]}
        return triton.runtime.build.compile_module_from_src(self.make_launcher(), "__launcher", **libraries)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> OldDriver:
    driver = OldDriver()
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", driver)  # type: ignore[arg-type]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.knobs.nvidia, "libcuda_path", None)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    return driver


KERNEL = SimpleNamespace(src="a kernel", metadata=None)


def test_it_is_built_where_there_is_no_gpu(driver: OldDriver, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_launcher(KERNEL)
    assert driver.built == ["a kernel"]
    assert len(list(tmp_path.rglob("__launcher*.so"))) == 1
    assert caplog.text == ""


def test_a_compiler_that_fails_is_told_of_once(
    driver: OldDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise subprocess.CalledProcessError(1, "gcc")

    monkeypatch.setattr(driver, "CudaLauncher", fail)
    for _ in range(3):
        build_launcher(KERNEL)
    assert [record.getMessage().split()[0] for record in caplog.records] == ["event=launcher_not_built"]


def test_a_triton_that_needs_none_builds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setattr(launchers, "_link_with_cuda", None)
    build_launcher(KERNEL)
