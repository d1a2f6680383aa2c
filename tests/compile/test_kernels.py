"""The list of an engine's kernels is what it launches, and they are compiled once, before it needs them."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import begin_command

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]
FAMILIES = ["talker", "dual_ar", "patches"]
# Shapes without memory need the compiler's.
IMPORTS = ("small_kernels", "torch._dynamo", "sonoro.compile.kernels", "sonoro.engine.runner", "sonoro.models.registry")
RELEASED = ["qwen3-tts-0.6b-customvoice", "fish-s2-pro", "voxcpm2"]


def begin(code: str, *arguments: str, cache: Path | None = None, **settings: str) -> subprocess.Popen[str]:
    """A process without threads, in which kernels are compiled, that runs `code`."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(TESTS / "support")]),
        "TRITON_CACHE_DIR": str(cache),
        "XDG_CACHE_HOME": str(cache),
        **settings,
    }
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return begin_command([sys.executable, "-c", code, *arguments], IMPORTS, env=environment, **piped)


def run(code: str, *arguments: str, cache: Path | None = None) -> tuple[str, str]:
    """What `code` prints, and what it logs."""
    process = begin(code, *arguments, cache=cache)
    printed, logged = process.communicate()
    assert process.returncode == 0, logged
    return printed.strip(), logged.strip()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_list_is_all_that_is_launched(family: str) -> None:
    """By an engine that speaks to requests of all kinds, chooses the codec's dtype, checks its kernels, encodes voices
    and does all else as on a GPU.
    """
    (listed, launched, *missing), _ = (part.splitlines() for part in run(SERVE, family))
    assert int(listed) >= int(launched) > 10
    assert missing == []


SERVE = """
import sys, tempfile
from pathlib import Path
import torch
from families import FAMILIES
from sine_engines import Clock, drain
from sonoro.core.config import EngineConfig, Tuning
from sonoro.core.types import Finished
from sonoro.engine import voice_encoder
from sine_engines import Engine
from sonoro.compile.kernels import list_variants
from sonoro.models.words import ShowsWords
from sonoro.ops import device
from sonoro.ops.dispatch import Operation, references_alone
from sonoro.compile.variants import card_named, recording
from sonoro.transport.messages import WorkerSettings
from sonoro.words.heads import WordHeads
from sonoro.words.tracking import Pointing

tiny, card = FAMILIES[sys.argv[1]], card_named("NVIDIA H200")
voice_encoder._WARM_UPS_S = (1.28, 0.3)  # a tiny codec makes many frames of a second
sizes = {"frame_batches": (1, 2, 3), "prefill_buckets": (16, 64), "codec_batches": (1, 3), "chunk_frames": (1, 3, 8)}
bounds = {"slots": 3, "max_positions": 1024, "max_frames": 64, "segment_letters": 60, "codec_dtype": "float16"}
config, listed, launched = EngineConfig(**bounds, **sizes), set(), set()
with tempfile.TemporaryDirectory() as folder:
    tiny.write(Path(folder))
    list_variants(WorkerSettings(model=folder, dtype="float32", config=config), card, listed.add)

def form(value):
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.data_ptr() % 16
    if isinstance(value, (tuple, list)):
        return [form(item) for item in value]
    return form(list(value.items())) if isinstance(value, dict) else repr(value)

called = set()

def call(operation, *args, **kwargs):
    if not Operation.has_kernels or not operation.is_supported(*args, **kwargs):
        return operation.reference(*args, **kwargs)
    if (key := (operation.name, str(form((args, kwargs))))) not in called:
        called.add(key)
        operation.kernel(*args, **kwargs)
    # What the reference calls is in the kernel.
    with references_alone():
        return operation.reference(*args, **kwargs)

def check(operation, arguments, tolerance):
    given = arguments()
    if operation.is_supported(*given):
        operation.kernel(*given)

# A CPU computes, with weights laid out as on a GPU, and what a card would launch is noted.
for module in [module for module in sys.modules.values() if hasattr(module, "lay_out_by_input")]:
    module.lay_out_by_input = lambda _: None
Operation.__call__, Operation.check, device._device_card = call, check, lambda _: card
model = tiny.load(torch.float32).model
if isinstance(model, ShowsWords):
    model.word_heads = WordHeads(text_first=Pointing(layer=0, head=1), text_along=Pointing(layer=1, head=0))
with recording(card, launched.add):
    engine = Engine(model, config, Clock(), ticks_late=1)
    for request in tiny.requests_of_all_kinds():
        engine.submit(request)
        engine.tick()
    assert isinstance(drain(engine)[-1], Finished)
print(len(listed), len(launched), sep="\\n")
print(*(launched - listed), sep="\\n", end="")
"""


@pytest.mark.parametrize("model", RELEASED)
def test_the_attention_that_serves_is_the_one_that_is_checked(model: str) -> None:
    """And none besides: each takes seconds to compile."""
    run(COMPARE, model)


COMPARE = """
import sys
import torch
from sonoro.core.config import EngineConfig, Tuning
from sonoro.engine.runner import Runner
from sonoro.models import registry
from sonoro.compile.variants import card_named, recording

def attention(variants):
    return {variant for variant in variants if variant.kernel.endswith(":decode")}

card, checked, served = card_named("NVIDIA H200"), [], []
with recording(card, checked.append):
    loaded = registry.load(sys.argv[1], device=torch.device("meta"), load_format="dummy")
    config = EngineConfig(slots=8, codec_batches=(1,), prefill_buckets=(16,), is_eager=True)
    runner = Runner(loaded.model, config.resolve())
with recording(card, served.append), runner.active():
    runner.graphs.run_all()
assert attention(checked) == attention(served) != set()
"""

FEW = """
import os, sys, time
from pathlib import Path
import msgspec
from small_kernels import double, launch, wrong
from sonoro.core.config import EngineConfig, Tuning
from sonoro.core.logs import configure_logging
from sonoro.compile import cache as kernel_cache, kernels
from sonoro.runtime.kernels import plans_of
from sonoro.compile.variants import card_named, recording
from sonoro.transport.messages import WorkerSettings

configure_logging(30)
cache, card = Path(os.environ["TRITON_CACHE_DIR"]), card_named("NVIDIA H200")

def list_variants(settings, card, note):
    with recording(card, note):
        launch(double, (32, 64, 128))
        launch(wrong, (32,))

def compile(card=card, **config):
    settings = WorkerSettings(model="a", device="cuda", config=EngineConfig(**config))
    return kernels.compile_kernels(settings, card, 2)

kernels.list_variants = list_variants
"""


def test_kernels_are_compiled_once_whatever_does_not_change_them(tmp_path: Path) -> None:
    code = """
record = compile(slots=4)
assert [kernel for kernel, _ in record.entries] == ["small_kernels:double"] * 3
assert all((cache / entry / "double.cubin").exists() for _, entry in record.entries)
assert [kernel for kernel, _ in record.errors] == ["small_kernels:wrong"]
assert compile(slots=4) is None
assert compile(slots=4, voices_folder="a", max_voices=7) is None
assert compile(slots=5) is not None
for change in ({"max_shared_bytes": 65_536}, {"tuning": Tuning(is_prefill_fused=False)}, {"quantization": "int8"}):
    assert compile(slots=4, **change) is not None
    assert compile(slots=4, **change) is None
"""
    _, logged = run(FEW + code, cache=tmp_path)
    assert "made_anew" not in logged


def test_settings_that_mean_the_same_share_what_is_compiled(tmp_path: Path) -> None:
    code = """
def misfits(**given):
    settings = WorkerSettings(device="cuda", config=EngineConfig(slots=4), **given)
    return kernels.KernelCache(settings, card).misfits

folder = cache / "model"
folder.mkdir()
os.chdir(cache)
kernels.compile_kernels(WorkerSettings(model="model", device="cuda", config=EngineConfig(slots=4)), card, 1)
for model in ("model", "./model", str(folder)):
    for dtype in (None, "auto", "bfloat16"):
        assert misfits(model=model, dtype=dtype) == [], (model, dtype)
assert misfits(model="model", dtype="float32") == [""]
assert misfits(model="another") == [""]
"""
    run(FEW + code, cache=tmp_path)


def test_a_failure_that_may_pass_is_not_remembered(tmp_path: Path) -> None:
    """A compiler that was killed tries again: at once, alone, and else at the next start."""
    code = """
from sonoro.compile.variants import Compiled
tried, whole, failures = cache / "tried", kernels.compile_variant, None

def compile_variant(variant, card):
    with tried.open("a") as file:
        file.write("x")
    count = len(tried.read_text())
    return Compiled("", failures[count - 1]) if count <= len(failures) else whole(variant, card)

def list_variants(settings, card, note):
    with recording(card, note):
        launch(double, (32,))

kernels.compile_variant, kernels.list_variants = compile_variant, list_variants
killed = "PTXASError: `ptxas` failed with error code -9"
for slots, (failures, expected) in enumerate((
    ([killed], (1, 0, 0)),
    ([killed, killed], (0, 0, 1)),
    (["of one kind", "of another"], (0, 0, 1)),
    (["of one kind", "of one kind"], (0, 1, 0)),
), 4):
    tried.write_text("")
    record = compile(slots=slots)
    assert (len(record.entries), len(record.errors), len(record.unfinished)) == expected, failures
    tried.write_text("x" * 9)
    # At the next start nothing is wrong, and only what was left is compiled.
    again = compile(slots=slots)
    assert (again is None) == (not expected[2])
    assert again is None or (len(again.entries), again.unfinished) == (1, [])
"""
    _, logged = run(FEW + code, cache=tmp_path)
    assert re.findall(r"event=kernels_made_anew differs=(\S+)", logged) == ["unfinished"] * 2


STAGES = """
listed = []

def list_variants(settings, card, note):
    sizes = settings.config.resolve().frame_batches
    listed.append(sizes)
    with recording(card, note):
        launch(double, [32 * size for size in sizes])

kernels.list_variants = list_variants
told = []
"""


def test_what_an_engine_needs_to_be_ready_is_compiled_first(tmp_path: Path) -> None:
    code = """
settings = WorkerSettings(model="a", device="cuda", config=EngineConfig(slots=8, is_ready_early=True))
noted, compiled, note = [], [], kernel_cache.KernelCache.note

def note_too(self, variant):
    noted.append(variant)
    note(self, variant)
    assert self.has(variant)

kernel_cache.KernelCache.note = note_too
record = kernels.compile_kernels(settings, card, 1, lambda *done: told.append(done[:2]))
assert listed == [(1, 8), (1, 2, 4, 8)]
assert len(record.entries) == 4
assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
sizes = [dict(variant.constants)[(3,)] // 32 for variant in noted]
assert sizes == [1, 8, 2, 4], sizes
# The record says as much.
assert not any(map(kernel_cache.KernelCache(settings, card).has, noted))
"""
    run(FEW + STAGES + code, cache=tmp_path)


def test_what_was_given_up_is_not_noted(tmp_path: Path) -> None:
    """The next start compiles it, and whoever launches it waits for that."""
    code = """
from sonoro.compile.variants import Compiled

def compile_variant(variant, card):
    block = dict(variant.constants)[(3,)]
    if block == 64:
        raise OSError("no space left")
    time.sleep(0.5 * (block == 32))
    return Compiled("entry")

given = []

def list_variants(settings, card, note):
    with recording(card, lambda variant: [given.append(variant), note(variant)]):
        launch(double, [32 * size for size in range(1, 9)])

kernels.compile_variant, kernels.list_variants = compile_variant, list_variants
settings = WorkerSettings(model="a", device="cuda", config=EngineConfig())
try:
    kernels.compile_kernels(settings, card, 1)
except OSError:
    pass
else:
    raise AssertionError("it was compiled")
cache = kernel_cache.KernelCache(settings, card)
assert len(given) == 8
assert cache.has(given[0])
assert not cache.has(given[1])
assert not cache.has(given[-1])
"""
    run(FEW + code, cache=tmp_path)


def test_a_launch_waits_for_its_own_kernel_whoever_compiles_it(tmp_path: Path) -> None:
    code = """
import threading
import triton
from sonoro.compile.cache import KernelCache
from sonoro.compile.compiler import Compiling, Standby
from sonoro.ops.device import recorded
from sonoro.compile.variants import _Elsewhere, await_kernels

class Compiler:
    code = None
    def poll(self):
        return self.code

settings = WorkerSettings(model="a", device="cuda", config=EngineConfig(slots=8))
variants, asked, compiler, done = [], [], Compiler(), threading.Event()
with recording(card, variants.append):
    launch(double, (32, 64, 128))
cache, work = KernelCache(settings, card), Compiling(compiler)

def wait_for(variant):
    asked.append(variant)
    work.wait_for(variant, cache)

def launch_all():
    for block in (32, 64, 128):
        try:
            launch(double, (block,))
        except Exception:
            pass  # there is no GPU to launch it on
        passed.append(block)
    done.set()

passed = []
with triton.knobs.runtime.scope(), recorded(card):
    triton.runtime.driver.set_active(_Elsewhere(card))
    await_kernels(card, wait_for)
    # As another process would, which compiles for itself too.
    with KernelCache(settings, card).alone():
        threading.Thread(target=launch_all, daemon=True).start()
        assert not done.wait(0.3)
        assert passed == []
        KernelCache(settings, card).note(variants[0])
        while asked != variants[:2]:
            time.sleep(0.01)
        assert passed == [32]
        # What was compiled for other code is not what is waited for.
        other = KernelCache(settings, card)
        other.made_for["code"] = "another"
        (other._done).mkdir()
        other.note(variants[1])
        assert not done.wait(0.3)
        compiler.code = 0
        assert done.wait(60)
assert asked == variants
assert work.waited_s > 0.5
"""
    run(FEW + code, cache=tmp_path)


def test_a_fork_compiles_what_it_is_told_and_nothing_else(tmp_path: Path) -> None:
    code = """
import signal
from sonoro.compile.cache import KernelCache
from sonoro.compile.compiler import Compiling, Standby

idle = Standby()
idle.drop()
work = Compiling(idle)
while not work.is_done:
    time.sleep(0.01)
assert list(cache.iterdir()) == []

settings = WorkerSettings(model="a", device="cuda", config=EngineConfig(slots=8, is_ready_early=True))
standby = Standby()
standby.begin(settings, card)
work = Compiling(standby)
while not work.is_done:
    time.sleep(0.01)
assert KernelCache(settings, card).misfits == []
assert len(list(cache.rglob("double.cubin"))) == 4

# One that is killed is told of, and nobody waits for it.
standby = Standby()
work = Compiling(standby)
os.kill(standby.pid, signal.SIGKILL)
while not work.is_done:
    time.sleep(0.01)
"""
    _, logged = run(FEW + STAGES + code, cache=tmp_path)
    assert re.findall(r"event=compile_failed exit_code=(\S+)", logged) == ["-9"]


def test_a_cache_that_does_not_fit_is_said_and_made_anew(tmp_path: Path) -> None:
    code = """
import shutil
assert compile() is not None
for change in (
    lambda: setattr(kernel_cache, "_code", lambda: "another"),
    lambda: setattr(kernel_cache.importlib.metadata, "version", lambda name: "3.5"),
    lambda: (plans_of(card)["fp8"].parent.mkdir(parents=True), plans_of(card)["fp8"].write_text("{}")),
    lambda: shutil.rmtree(cache / record.entries[0][1]),
    lambda: globals().update(card=card_named("NVIDIA B200")),
):
    change()
    record = compile(card)
    assert len(record.entries) == 3
    assert compile(card) is None
"""
    _, logged = run(FEW + code, cache=tmp_path)
    said = re.findall(r"event=kernels_made_anew differs=(\S+)", logged)
    assert said == ["code", "triton", "plans", "entries", "card"]


def test_what_is_not_on_the_list_is_compiled_when_it_is_launched_and_counted(tmp_path: Path) -> None:
    """As Triton does by itself, from its own description of the launch; what is on the list is only loaded."""
    code = """
from collections import Counter
import triton
from sonoro.compile.variants import count_compiled, source_of

compile()
counts, unlisted = Counter(), []
count_compiled(counts)
with recording(card, unlisted.append):
    launch(double, (32, 512))
target = triton.backends.compiler.GPUTarget(*card.target)
for variant in unlisted:
    triton.compile(source_of(variant), target=target, options=dict(variant.options))
print(dict(counts))
"""
    printed, logged = run(FEW + code, cache=tmp_path)
    assert printed == "{'double': 1}"
    assert len(re.findall(r"event=kernel_compiled_at_launch kernel=double seconds=\d", logged)) == 1


MAIN = (
    FEW
    + """
seconds, parent, cardinal = float(sys.argv[1]), sys.argv[2], kernels.compile_variant

def compile_variant(variant, card):
    (cache / f"began.{os.getpid()}").touch()
    time.sleep(seconds)
    return cardinal(variant, card)

kernels.compile_variant = compile_variant
given = (WorkerSettings(model="a"), card)
sys.argv[1:] = [*(msgspec.json.encode(part).decode() for part in given), parent]
kernels.main()
"""
)


def compile_slowly(cache: Path, seconds: float, parent: int | None = None) -> subprocess.Popen[str]:
    return begin(MAIN, str(seconds), str(parent or os.getpid()), cache=cache)


def compilers(cache: Path) -> list[int]:
    """The processes that have begun to compile a kernel."""
    return [int(path.suffix[1:]) for path in cache.glob("began.*")]


def test_engines_that_start_at_once_compile_once(tmp_path: Path) -> None:
    processes = [compile_slowly(tmp_path, 0.1) for _ in range(3)]
    assert [(process.communicate(), process.returncode)[1] for process in processes] == [0, 0, 0]
    # Those of one of the three: it has two at most.
    assert 1 <= len(compilers(tmp_path)) <= 16
    assert len(list((tmp_path / "sonoro").glob("*.json"))) == 1


def test_nobody_waits_for_one_that_was_killed_and_its_forks_end_with_it(tmp_path: Path) -> None:
    killed = compile_slowly(tmp_path, 600)
    wait_for(lambda: compilers(tmp_path))
    killed.kill()
    killed.communicate()
    wait_for(lambda: not any(map(is_running, compilers(tmp_path))))
    second = compile_slowly(tmp_path, 0)
    second.communicate()
    assert second.returncode == 0


def test_compiling_ends_with_the_engine(tmp_path: Path) -> None:
    """Which may have been killed; it cannot end what it has started then."""
    gone = 2**22 + 1  # no process has such a number on Linux
    process = compile_slowly(tmp_path, 600, gone)
    process.communicate()
    assert process.returncode != 0
    assert compilers(tmp_path) == []


def wait_for(holds: object) -> None:
    while not holds():
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether `pid` is there and not merely waiting to be reaped by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["qwen3-tts-0.6b-base", "fish-s2-pro", "voxcpm2"])
def test_a_start_compiles_nothing_after_sonoro_compile(model: str, tmp_path: Path) -> None:
    """Neither do its checks, its graphs and the encoding of voices; an engine finds each kernel in the cache."""
    name, _ = run("import torch; print(torch.cuda.get_device_name())")
    command = [sys.executable, "-m", "sonoro", "compile", model, "--device-name", name, "--slots", "4"]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    # Where it is compiled there is no GPU to be seen.
    done = subprocess.run(command, env={**environment, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    (hits, *missed), _ = (part.split() for part in run(START, model, cache=tmp_path))
    assert int(hits) > 50
    assert missed == []


START = """
import sys
import triton
from sonoro.core.config import EngineConfig, Tuning
from sonoro.compile.cache import KernelCache
from sine_engines import Engine
from sonoro.models import registry
from sonoro.compile.variants import current_card
from sonoro.transport.messages import WorkerSettings

hits, missed = [], []

def listen(*, src, cache_hit, **_):
    (hits if cache_hit else missed).append(src.name)

triton.knobs.compilation.listener = listen
settings = WorkerSettings(model=sys.argv[1], device="cuda", load_format="dummy", config=EngineConfig(slots=4))
misfits = KernelCache(settings, current_card()).misfits
assert not misfits, f"there is something to compile: {misfits}"
loaded = registry.load(settings.model, load_format="dummy")
engine = Engine(loaded.model, settings.config)
engine.voices.encoder.warm_up()
while engine.runner.graphs.to_come:
    with engine.runner.active():
        engine.runner.graphs.capture_next()
print(len(hits), *missed)
"""
