"""Standard workloads, a whole measurement on a small model, and what is read out of a profile."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from mie import cli
from mie.bench import offline, recorded_run
from mie.bench.bound import Limits
from mie.bench.model_shapes import random_decoder
from mie.bench.offline import MEMORY_SHARE, WINDOW, blocks_for, config_for, measure_workload
from mie.bench.offline_result import Split, Window
from mie.bench.recorded_run import as_recording, commit_of, stamp
from mie.bench.standard_workloads import StandardWorkload, standard_workload
from mie.bench.step_profile import Kernel, profile_steps, read_profile, union
from mie.book import recordings
from mie.errors import ConfigError, MieError
from mie.model.config import ModelConfig
from mie.scheduling.scheduler import Scheduler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = {
    "model_type": "llama",
    "vocab_size": 10_016,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def decoder():
    return random_decoder(ModelConfig.from_dict(SHAPE), torch.float32, DEVICE)


@pytest.fixture(scope="module")
def few():
    """Three requests of nano, prompts and answers of 40 tokens."""
    return standard_workload("nano").limited(3, 40)


# -- the workloads -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "requests", "prompt_tokens", "output_tokens"),
    [("nano", 256, 142_827, 133_966), ("chat", 1000, 173_968, 198_272), ("single", 1, 128, 256)],
)
def test_workloads_have_the_tokens_that_others_were_measured_on(
    name, requests, prompt_tokens, output_tokens
):
    workload = standard_workload(name)
    assert len(workload.prompts) == len(workload.answers) == requests
    assert (workload.prompt_tokens, workload.output_tokens) == (prompt_tokens, output_tokens)
    assert 0 <= min(map(min, workload.prompts)) <= max(map(max, workload.prompts)) <= 10_000
    assert workload.title == name and workload == standard_workload(name)


def test_lengths_stay_within_their_bounds():
    for name, least in (("nano", 100), ("chat", 4)):
        lengths = [n for pair in standard_workload(name).lengths for n in pair]
        assert least <= min(lengths) and max(lengths) <= 1024


def test_a_part_of_a_workload_says_so(few):
    whole = standard_workload("nano")
    assert few.title == "nano, first 3 requests, cut to 40 tokens"
    assert few.prompts == tuple(prompt[:40] for prompt in whole.prompts[:3])
    assert few.answers == (40, 40, 40)
    assert whole.limited() == whole and whole.limited(256) == whole
    for nothing in ({"num_requests": 0}, {"tokens": 0}):
        with pytest.raises(ConfigError, match="is 0; a workload has at least 1"):
            whole.limited(**nothing)


def test_requests_are_what_all_engines_are_asked_for(few):
    one, other = few.requests("a"), few.requests("b")
    assert [r.prompt for r in one] == [r.prompt for r in other] == list(few.prompts)
    assert not {r.request_id for r in one} & {r.request_id for r in other}
    assert {r.salt for r in one} != {r.salt for r in other}
    for request in one:
        assert request.sampling.temperature == 0.6 and request.sampling.ignore_eos
        assert request.sampling.max_tokens == 40


def test_an_unknown_workload_is_refused_with_a_list():
    with pytest.raises(ConfigError, match="'sharegpt'; there are nano, chat, single"):
        standard_workload("sharegpt")


# -- a measurement -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told():
    return []


@pytest.fixture(scope="module")
def schedulers():
    return []


@pytest.fixture(scope="module")
def result(decoder, few, told, schedulers, tmp_path_factory):
    def scheduler(*arguments):
        schedulers.append(Scheduler(*arguments))
        return schedulers[-1]

    return measure_workload(
        decoder,
        few,
        model="small",
        runs=2,
        limits=Limits(1e9, 1e9, "made up"),
        parts={"scheduler": scheduler},
        tell=lambda *what: told.append(what),
    )


def test_every_run_gives_all_tokens_in_the_fewest_steps(result):
    assert len(result.runs) == 2 and result.num_requests == 3
    for run in result.runs:
        assert run.output_tokens == 120
        assert 40 <= run.steps <= 44  # some more where steps are in flight
        assert run.tokens_per_second == 120 / run.seconds
    assert result.best.seconds == min(run.seconds for run in result.runs)
    assert result.prompt_tokens == 120


def test_the_window_is_the_middle_and_the_scheduler_is_a_part_of_it(result):
    for run in result.runs:
        window = run.window
        assert window.steps == WINDOW
        assert 0 < window.schedule_seconds + window.update_seconds < window.seconds < run.seconds
        assert min(window.schedule_seconds, window.update_seconds) > 0


def test_one_engine_ran_it_all_and_its_prefix_cache_found_nothing(result, schedulers):
    memory = schedulers[0].memory
    assert memory.prefix_cache.hits.hit == 0
    runs = 4 if DEVICE.type == "cuda" else 3  # the warm-up, two runs, one under the profiler
    assert memory.prefix_cache.hits.queried == runs * 120
    assert not schedulers[0].has_work or DEVICE.type == "cuda"  # whose profile stops in the middle


def test_the_split_adds_up(result):
    split = result.split
    parts = split.schedule_seconds + split.launch_seconds + split.update_seconds
    assert parts == pytest.approx(split.cpu_seconds)
    if DEVICE.type == "cpu":
        assert split.cpu_seconds == split.wall_seconds
        assert split.gpu_seconds is split.gap_seconds is None
    else:
        assert split.gpu_seconds > 0 and split.gpu.launches > 5 and split.gpu.kernels


def test_the_share_is_the_bound_over_the_best_run(result):
    assert result.bound_says == "made up"
    assert result.share_of_bound == result.bound.seconds / result.best.seconds > 0
    assert result.bound.work.steps == 40


def test_progress_is_told(result, told):
    assert {doing for doing, _, _ in told} >= {"warm-up", "run 1 of 2", "run 2 of 2"}
    assert ("run 2 of 2", 120, 120) in told and all(out <= total for _, out, total in told)


def test_settings_suit_the_workload_and_can_be_given(decoder, few):
    budget = {"cpu": 512, "cuda": 16_384}[DEVICE.type]
    config = config_for(decoder, few, {})
    assert (config.max_num_seqs, config.token_budget, config.max_model_len) == (256, budget, 4096)
    assert config.trace_steps == 0 and config.num_blocks == blocks_for(few, 256, 16)
    config = config_for(decoder, few, {"max_num_seqs": 2, "token_budget": None, "num_blocks": 9})
    assert (config.max_num_seqs, config.token_budget, config.num_blocks) == (2, budget, 9)
    assert config_for(decoder, few, {"memory_share": 0.001}).num_blocks is None
    with pytest.raises(ConfigError, match="no setting called sequences"):
        config_for(decoder, few, {"sequences": 2})


def test_blocks_are_for_the_longest_that_run_at_once():
    workload = StandardWorkload("x", ((1,) * 16, (1,) * 30), (16, 3), 2)
    assert blocks_for(workload, 1, 16) == 1 + 3 + 2
    assert blocks_for(workload, 2, 16) == 1 + (3 + 2) + (2 + 2)


def test_where_memory_is_short_a_share_of_it_is_taken(decoder, few, monkeypatch):
    wanted = blocks_for(few, 256, 16) * 16 * 2 * 32 * 4
    for memory, share in ((2 * wanted, None), (2 * wanted - 2, MEMORY_SHARE[DEVICE.type])):
        monkeypatch.setattr("mie.engine.sizing.device_memory", lambda device, m=memory: m)
        config = config_for(decoder, few, {})
        assert config.memory_share == share and (config.num_blocks is None) == (share is not None)


def test_what_does_not_fit_is_refused_with_both_numbers(decoder, few):
    with pytest.raises(ConfigError, match="has 80 tokens with its answer; the engine reads 64"):
        measure_workload(decoder, few, max_model_len=64)
    narrow = random_decoder(
        ModelConfig.from_dict(SHAPE | {"vocab_size": 100}), torch.float32, "cpu"
    )
    with pytest.raises(ConfigError, match=r"token ids up to 9,\d+; the model's vocabulary has 100"):
        measure_workload(narrow, few)
    with pytest.raises(ConfigError, match="runs is 0"):
        measure_workload(decoder, few, runs=0)


def test_an_answer_of_one_token_is_measured_too(decoder):
    result = measure_workload(decoder, standard_workload("single").limited(tokens=1), runs=1)
    assert result.best.output_tokens == 1 and result.split.window.steps >= 1


# -- engines that answer late, or not at all -----------------------------------------------------


class FakeCore:
    """A token for each request in each step; ``late``: they come out one step later."""

    def __init__(self, late=0, lost=0):
        self.left, self.waiting, self.lost = {}, [[]] * late, lost

    def add(self, request):
        self.left[request.request_id] = request.sampling.max_tokens

    @property
    def has_work(self):
        return bool(self.left) or any(self.waiting)

    def step(self):
        outputs = [SimpleNamespace(token_id=7) for _ in self.left]
        self.left = {name: n - 1 for name, n in self.left.items() if n > 1}
        self.waiting.append(outputs[self.lost :])
        return self.waiting.pop(0)


@pytest.fixture
def fake(monkeypatch):
    def install(core):
        engine = SimpleNamespace(core=core)
        monkeypatch.setattr("mie.engine.assemble.assemble", lambda *_: engine)
        monkeypatch.setattr(offline, "_profile_gpu", lambda *_: None)

    return install


def test_an_engine_with_steps_in_flight_is_run_to_its_end(decoder, few, fake):
    fake(FakeCore(late=2))
    result = measure_workload(decoder, few, runs=1)
    assert (result.best.output_tokens, result.best.steps) == (120, 42)
    assert result.split.window.steps == WINDOW


def test_missing_tokens_are_an_error(decoder, few, fake):
    fake(FakeCore(lost=1))
    with pytest.raises(MieError, match="80 tokens came out of a run, and 120 were asked for"):
        measure_workload(decoder, few, runs=1)


# -- profiles ------------------------------------------------------------------------------------


def test_a_profile_is_a_trace_of_steps_in_the_middle(decoder, few, tmp_path):
    file = tmp_path / "steps.json"
    measure_workload(decoder, few, runs=1, profile=file)
    events = json.loads(file.read_text())["traceEvents"]
    if DEVICE.type == "cuda":
        assert any(event.get("cat") == "kernel" for event in events)
    else:
        steps = {event["args"]["step"] for event in events if event["name"] == "schedule"}
        assert len(steps) == WINDOW and min(steps) > 15


def test_a_profile_that_cannot_be_written_is_an_error(decoder, few, tmp_path):
    with pytest.raises(MieError, match="cannot be written"):
        measure_workload(decoder, few.limited(1, 2), runs=1, profile=tmp_path / "nowhere" / "file")


def test_the_profiler_records_so_many_steps():
    x = torch.ones(8, 8, device=DEVICE)
    calls = []

    def step():
        calls.append(x @ x)

    trace, steps, seconds = profile_steps(step, lambda: len(calls) < 3, 5, DEVICE, operations=True)
    names = [event.get("name") for event in json.loads(trace)["traceEvents"]]
    assert steps == len(calls) == 3 and seconds > 0
    assert names.count("aten::mm") == 3


@pytest.mark.parametrize(
    ("spans", "length"),
    [([], 0), ([(0, 2), (5, 6)], 3), ([(4, 6), (0, 5)], 6), ([(0, 9), (2, 3), (8, 10)], 10)],
)
def test_a_union_counts_nothing_twice(spans, length):
    assert union(spans) == length


def event(cat, name, ts, dur, correlation=None):
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def test_a_profile_is_read_as_averages_of_a_step():
    events = [
        event("kernel", "matmul", 100, 400, 1),
        event("kernel", "softmax", 400, 200, 2),  # half of it beside the other
        event("kernel", "matmul", 700, 200, 3),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 900, 10, 4),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 950, 10, 5),
        event("gpu_user_annotation", "not work", 0, 5000),
        event("cuda_runtime", "cudaLaunchKernel", 50, 5, 1),
        event("cuda_runtime", "cudaMemcpyAsync", 600, 310, 4),  # returns when it is done
        event("cuda_runtime", "cudaMemcpyAsync", 940, 5, 5),  # a launch
        event("cuda_runtime", "cudaStreamSynchronize", 910, 20, 6),
        event("cuda_runtime", "cudaDeviceSynchronize", 960, 1000, 7),  # the end of the profile
        {"ph": "M", "name": "process_name"},
    ]
    steps = read_profile(json.dumps({"traceEvents": events}), 2, 1000e-6)
    assert steps.wall_seconds == pytest.approx(500e-6)
    assert steps.busy_seconds == pytest.approx((500 + 200 + 10 + 10) / 2 * 1e-6)
    assert steps.cpu_seconds == pytest.approx((1000 - 310 - 20) / 2 * 1e-6)
    assert steps.launches == 2.5
    assert steps.kernels[0] == Kernel("matmul", pytest.approx(300e-6), 1.0)
    split = Split(Window(10, 6e-3, 1e-3, 0.5e-3), steps)
    assert split.gap_seconds == pytest.approx(600e-6 - 360e-6)
    assert split.launch_seconds == pytest.approx(335e-6 - 100e-6 - 50e-6)


# -- the recording -------------------------------------------------------------------------------


def test_a_recording_can_be_cited(result, decoder, tmp_path, monkeypatch):
    content = as_recording(result, stamp(decoder, commit="abc"))
    (tmp_path / "run.json").write_text(json.dumps(content))
    monkeypatch.setattr(recordings, "RESULTS", tmp_path)
    run = recordings.recording("run")
    assert run["output_tokens_per_s"] == result.best.tokens_per_second
    assert run["share_of_bound"] == result.share_of_bound
    assert "small, workload nano, first 3 requests" in run.how and torch.__version__ in run.stamp
    assert content["commit"] == "abc" and content["dtype"] == "float32"
    assert [each["seconds"] for each in content["runs"]] == [r.seconds for r in result.runs]
    assert content["settings"]["max_num_seqs"] == 256
    assert ("step_gpu_s" in content["values"]) == (DEVICE.type == "cuda")


def test_no_commit_where_there_is_no_checkout(tmp_path, monkeypatch):
    assert commit_of(tmp_path) is None
    (tmp_path / ".git").mkdir()
    assert commit_of(tmp_path) is None  # git says no
    monkeypatch.setenv("PATH", "")
    assert commit_of(recorded_run.CHECKOUT) is None


def test_a_measurement_needs_no_terminal_and_no_tokenizer():
    code = """
import sys
sys.modules.update(dict.fromkeys(["typer", "rich", "click", "tokenizers", "transformers"]))
import mie.bench.model_shapes, mie.bench.offline, mie.bench.recorded_run
import mie.engine.assemble, mie.engine.sizing, mie.model.decoder, mie.model.weights
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# -- the command ---------------------------------------------------------------------------------


def command(*options):
    return CliRunner().invoke(cli.app, ["bench", "throughput", *map(str, options)])


@pytest.fixture
def config_file(tmp_path):
    folder = tmp_path / "my-shape"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder / "config.json"


@pytest.fixture
def short_single(monkeypatch):
    from mie.bench import standard_workloads

    short = standard_workload("single").limited(tokens=24)
    monkeypatch.setitem(standard_workloads.WORKLOADS, "single", lambda: short)


def test_the_command_shows_runs_and_where_a_step_goes(config_file, short_single, tmp_path):
    files = ("--json", tmp_path / "run.json", "--profile", tmp_path / "steps.json")
    shape = ("--model-config", config_file, "--random-weights", "--device", "cpu", "--runs", "2")
    result = command("--workload", "single", *shape, *files, "--token-budget", "64")
    assert result.exit_code == 0, result.stderr
    text = " ".join(result.stdout.split())
    for words in ("my-shape, single", "run 2", "no bound", "no GPU", "schedule", "24 out"):
        assert words in text
    numbers = json.loads((tmp_path / "run.json").read_text())
    assert numbers["model"] == "my-shape" and numbers["settings"]["token_budget"] == 64
    assert str(tmp_path) not in json.dumps(numbers)
    assert json.loads((tmp_path / "steps.json").read_text())["traceEvents"]
    assert "wrote" in result.stderr


def test_the_command_writes_json_alone(config_file, short_single):
    shape = ("--model-config", config_file.parent, "--random-weights", "--device", "cpu")
    result = command("--workload", "single", *shape, "--runs", "1", "--json", "-")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["values"]["output_tokens"] == 24


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ("--workload nano", 2, "needs --model-config or --model"),
        ("--workload nano --model-config qwen3-0.6b", 2, "add --random-weights"),
        ("--workload nano --random-weights", 2, "give --model-config"),
        ("--workload nano --model a --model-config b --random-weights", 2, "--model a or"),
        ("--workload nano --model a --decode", 2, "--decode does not go with --workload"),
        ("--workload nano --model a --alone 2", 2, "--alone does not go with --workload"),
        ("--workload nano --model a --seed 2", 2, "--seed does not go with --workload"),
        ("--workload nano --model a --trace x", 2, "--trace does not go with --workload"),
        ("--workload nano --model a --json /nowhere/x", 2, "there is no folder"),
        ("--workload nano --model a --profile /nowhere/x", 2, "there is no folder"),
        ("--runs 2", 2, "--runs needs --workload"),
        ("--profile x", 2, "--profile needs --workload"),
        ("--model-config qwen3-0.6b", 2, "--model-config needs --workload"),
        ("--workload nope --model-config x --random-weights", 1, "there are nano, chat, single"),
        ("--workload nano --model-config x --random-weights", 1, "shapes are qwen3-0.6b"),
        ("--workload nano --model-config qwen3-0.6b --random-weights --dtype int4", 1, "'int4'"),
        ("--workload nano --model-config qwen3-0.6b --random-weights --device tpu", 1, "'tpu'"),
    ],
)
def test_the_command_refuses_before_it_works(options, code, says):
    result = command(*options.split())
    text = " ".join(result.stderr.replace("│", " ").split())
    assert result.exit_code == code and says in text, text
    assert result.stdout == ""


def test_the_help_has_examples():
    text = " ".join(command("--help").stdout.split())
    assert "--workload nano --model-config qwen3-0.6b" in text and "16,384" in text
