"""The command line: streams, keeps stdout clean, answers refusals in one line, survives Ctrl-C."""

from __future__ import annotations

import codecs
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from mie import SamplingParams, cli
from mie.engine.outputs import Completion, RequestOutput
from mie.errors import ChatTemplateError, ContextLengthError, ModelNotFoundError
from mie.model import packaged
from mie.request import FinishReason


@dataclass
class Piece:
    text: str
    token_id: int | None = 0
    finish_reason: str | None = None
    num_cached_tokens: int = 0


@dataclass
class FakeLLM:
    """Answers with ``answers`` in turn, a list of pieces each; remembers what it was asked."""

    answers: list = field(default_factory=lambda: [["Par", "is", "."]])
    finish_reason: str = "stop"
    num_cached_tokens: int = 0
    context: int = 100
    prompts: list = field(default_factory=list)
    asked: list = field(default_factory=list)

    def __post_init__(self):
        self.max_context = self.context
        self.tokenizer = SimpleNamespace(encode_prompt=lambda text: [ord(c) for c in text])

    def chat_prompt(self, messages):
        self.asked.append(list(messages))
        return list(range(10 * len(messages)))

    def stream(self, prompt, sampling):
        if len(prompt) >= self.context:
            raise ContextLengthError(f"{len(prompt)} tokens; the model reads {self.context}")
        self.prompts.append((prompt, sampling))
        return self._pieces(self.answers[(len(self.prompts) - 1) % len(self.answers)])

    def _pieces(self, texts):
        for index, text in enumerate(texts):
            if isinstance(text, BaseException):
                raise text
            last = index == len(texts) - 1
            reason = self.finish_reason if last else None
            ends_without_a_token = reason == "kv_exhausted"
            token_id = None if ends_without_a_token else index
            yield Piece(text, token_id, reason, self.num_cached_tokens)

    def generate(self, prompt, sampling):
        self.prompts.append((prompt, sampling))
        texts = ["".join(self.answers[place % len(self.answers)]) for place in range(sampling.n)]
        completions = [Completion(text, [1, 2], FinishReason.LENGTH) for text in texts]
        return RequestOutput("1", tuple(prompt), completions, self.num_cached_tokens, 0.5, 2.0)


@pytest.fixture
def llm(monkeypatch):
    fake = FakeLLM()
    monkeypatch.setattr(cli, "load_llm", lambda model, dtype, device, num_blocks: fake)
    monkeypatch.delenv("MIE_DEBUG", raising=False)
    return fake


def mie(*arguments, stdin=None):
    return CliRunner().invoke(cli.app, list(arguments), input=stdin)


# -- generate -----------------------------------------------------------------------------------


def test_only_the_answer_goes_to_stdout_and_times_go_to_stderr(llm):
    result = mie("generate", "Capital?", "--max-tokens", "7")
    assert result.exit_code == 0
    assert result.stdout == "Paris.\n"
    assert re.fullmatch(
        r"10 prompt tokens in [\d.]+ s · 3 tokens at [\d.]+ a second · the model ended it\n",
        result.stderr,
    )
    assert llm.asked == [[{"role": "user", "content": "Capital?"}]]
    assert llm.prompts == [(list(range(10)), SamplingParams(max_tokens=7))]


def test_what_was_in_memory_already_is_said(llm):
    llm.num_cached_tokens = 6
    assert mie("generate", "Capital?").stderr.startswith("10 prompt tokens, 6 cached, in 0.")


def test_how_an_answer_is_drawn_is_passed_on(llm):
    mie("generate", "Capital?", "--temperature", "0.7", "--seed", "5")
    mie("chat", "--temperature", "0.2", "--seed", "6", stdin="Hi\n")
    one, two = (sampling for _, sampling in llm.prompts)
    assert one == SamplingParams(max_tokens=256, temperature=0.7, seed=5)
    assert (two.temperature, two.seed) == (0.2, 6)


def test_several_answers_have_headings_on_stderr_and_texts_on_stdout(llm):
    llm.answers = [["Par", "is."], ["Rome."], ["Oslo\x1b."]]
    result = mie("generate", "Capital?", "--n", "3", "--temperature", "1")
    assert (result.exit_code, result.stdout) == (0, "Paris.\nRome.\nOslo\x1b.\n")
    headings = [f"{number} of 3, cut at the limit of tokens" for number in (1, 2, 3)]
    assert result.stderr.splitlines()[-4:] == [
        *headings,
        "10 prompt tokens in 0.50 s · 6 tokens at 1.5 a second",
    ]
    assert llm.prompts[0][1] == SamplingParams(max_tokens=256, temperature=1.0, n=3)
    said = mie("generate", "Capital?", "--n", "2", "--temperature", "1", "--no-stats").stderr
    assert said.splitlines()[-1].startswith("2 of 2")


def test_ctrl_c_before_several_answers_are_there(llm, monkeypatch):
    def interrupted(prompt, sampling):
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "generate", interrupted)
    result = mie("generate", "Capital?", "--n", "2", "--temperature", "1")
    assert (result.exit_code, result.stdout) == (130, "")


def test_the_size_of_the_memory_reaches_the_engine(monkeypatch):
    sizes = []

    def load(model, dtype, device, num_blocks):
        sizes.append(num_blocks)
        return FakeLLM()

    monkeypatch.setattr(cli, "load_llm", load)
    mie("generate", "x", "--num-blocks", "40")
    mie("chat", "--num-blocks", "41", stdin="")
    mie("generate", "x")
    assert sizes == [40, 41, None]


def test_an_answer_that_the_memory_ended_says_so_and_counts_no_token_for_it(llm):
    llm.finish_reason = "kv_exhausted"
    result = mie("generate", "Capital?")
    assert result.stdout == "Paris.\n"
    assert " s · 2 tokens at " in result.stderr
    assert result.stderr.endswith("cut where the K/V memory ended\n")
    assert "the context of 100 tokens is full" in mie("chat", stdin="Hi\n").stderr


@pytest.mark.parametrize("reason", FinishReason)
def test_every_way_to_end_has_its_words(reason):
    from mie.terminal.answer import ENDINGS

    assert ENDINGS[reason]


def test_without_stats_nothing_is_said(llm):
    assert mie("generate", "Capital?", "--no-stats").stderr == ""


def test_each_piece_is_written_before_the_next_is_asked_for(monkeypatch):
    """A stream: the model must not be asked for a token before the last one can be seen."""
    from mie.terminal.answer import show_answer

    seen = []
    output = SimpleNamespace(
        write=lambda text: seen.append(("write", text)),
        flush=lambda: seen.append("flush"),
        isatty=lambda: False,
    )

    def pieces():
        for text in ("a", "b"):
            seen.append("compute")
            yield Piece(text)

    show_answer(pieces(), 1, output)
    step = ["compute", ("write", "a"), "flush", "compute", ("write", "b"), "flush"]
    assert seen == [*step, ("write", "\n"), "flush"]


def test_raw_leaves_the_chat_template_out(llm):
    mie("generate", "ab", "--raw")
    assert llm.asked == []
    assert llm.prompts[0][0] == [97, 98]


def test_a_system_message_comes_first(llm):
    mie("generate", "Hi", "--system", "Be brief.")
    assert [message["role"] for message in llm.asked[0]] == ["system", "user"]


def test_the_prompt_can_come_from_stdin(llm):
    mie("generate", "-", stdin="two\nlines é\n")
    assert llm.asked[0][0]["content"] == "two\nlines é"


def test_stdin_that_is_not_text_is_refused(llm):
    result = mie("generate", "-", stdin=b"ab\xff")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "not UTF-8: invalid start byte at 2" in result.stderr


def test_control_characters_reach_a_pipe_but_not_a_terminal():
    from mie.terminal.answer import show_answer

    class Terminal:
        def __init__(self, is_terminal):
            self.text, self.isatty = "", lambda: is_terminal

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    for is_terminal, expected in ((False, "a\x1b[2J\tb\n"), (True, "a[2J\tb\n")):
        output = Terminal(is_terminal)
        answer = show_answer(iter([Piece("a\x1b[2J"), Piece("\tb")]), 1, output)
        assert output.text == expected
        assert answer.text == "a\x1b[2J\tb"


def test_ctrl_c_ends_the_answer_with_what_came(llm):
    llm.answers = [["Par", KeyboardInterrupt()]]
    result = mie("generate", "Capital?")
    assert result.exit_code == 130
    assert result.stdout == "Par\n"
    assert "1 token · you stopped it" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate"],
        ["generate", "x", "--max-tokens", "0"],
        ["generate", "x", "--raw", "--system", "y"],
        ["generate", "x", "--temperature", "-1"],
        ["generate", "x", "--seed", "-1"],
        ["generate", "x", "--n", "0", "--temperature", "1"],
        ["generate", "x", "--n", "2"],
        ["generate", "x", "--num-blocks", "1"],
        ["generate", "x", "--nonsense"],
        ["nonsense"],
    ],
)
def test_a_command_written_wrongly_is_exit_code_2(llm, arguments):
    result = mie(*arguments)
    assert result.exit_code == 2
    assert result.stdout == "" and "Usage" in result.stderr


# -- refusals -----------------------------------------------------------------------------------


def test_a_refusal_is_one_line_on_stderr_and_exit_code_1(monkeypatch):
    def refuse(*_):
        raise ModelNotFoundError("no model is called [red]x[/]")

    monkeypatch.setattr(cli, "load_llm", refuse)
    result = mie("generate", "x")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: no model is called [red]x[/]\n"
    assert mie("generate", "").stderr == "error: the prompt is empty\n"


@pytest.mark.parametrize("by", ["option", "variable"])
def test_debug_raises_the_error_itself(monkeypatch, by):
    def refuse(*_):
        raise ModelNotFoundError("no such model")

    monkeypatch.setattr(cli, "load_llm", refuse)
    if by == "variable":
        monkeypatch.setenv("MIE_DEBUG", "1")
    result = mie(*(["--debug"] if by == "option" else []), "generate", "x")
    assert isinstance(result.exception, ModelNotFoundError)


def test_a_mistake_of_ours_is_not_hidden(llm):
    llm.answers = [[ZeroDivisionError("ours")]]
    assert isinstance(mie("generate", "x").exception, ZeroDivisionError)


def test_the_whole_program_prints_an_error_without_a_traceback():
    program = "import sys; from mie.cli import app; app(sys.argv[1:])"
    command = [sys.executable, "-c", program, "generate", "x", "--model", "no-such-model"]
    environment = {key: value for key, value in os.environ.items() if key != "MIE_DEBUG"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: no model is called 'no-such-model'")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["--version"], ["nope"]])
def test_help_answers_without_importing_torch(arguments):
    program = (
        "import sys; from mie.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "finally: print('imported:', *sorted(sys.modules), file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    imported = result.stderr.partition("imported: ")[2].split()
    assert "mie.cli" in imported
    assert not {"torch", "numpy", "tokenizers", "huggingface_hub", "gguf"} & {*imported}


@pytest.mark.parametrize("command", ["generate", "chat", "check", "models", "doctor"])
def test_every_command_shows_an_example(command):
    result = mie(command, "--help")
    assert result.exit_code == 0
    assert f"Example: mie {command}" in " ".join(result.stdout.split())


def test_version():
    from mie import __version__

    assert mie("--version").stdout == f"mie {__version__}\n"


# -- chat ---------------------------------------------------------------------------------------


def roles(messages):
    return [(message["role"], message["content"]) for message in messages]


def test_a_chat_remembers_what_was_said(llm):
    llm.answers = [["Hel", "lo"], ["Again"]]
    result = mie("chat", "--system", "S", stdin="Hi\n\nMore\n")
    assert result.exit_code == 0
    assert result.stdout == "Hello\nAgain\n"
    assert roles(llm.asked[1]) == [
        ("system", "S"),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "More"),
    ]


def test_reset_forgets_all_but_the_system_message(llm):
    mie("chat", "--system", "S", stdin="Hi\n/reset\nMore\n")
    assert roles(llm.asked[1]) == [("system", "S"), ("user", "More")]


def test_exit_leaves_at_once(llm):
    assert mie("chat", stdin="/exit\nHi\n").exit_code == 0
    assert llm.asked == []


def test_help_and_unknown_commands_list_the_commands(llm):
    result = mie("chat", stdin="/help\n/nonsense\n")
    assert "/reset  forget everything" in result.stderr
    assert "there is no /nonsense; there are /reset, /stats, /help, /exit" in result.stderr
    assert result.stdout == "" and llm.asked == []


def test_stats_tell_of_the_last_answer_and_of_the_context(llm):
    result = mie("chat", stdin="/stats\nHi\n/stats\n")
    assert result.stderr.startswith("no answer yet\n10 prompt tokens")
    assert result.stderr.endswith("context: 13 of 100 tokens\n")


def test_a_question_that_does_not_fit_leaves_the_conversation_as_it_was(llm):
    """Ten tokens a message: at the sixth turn eleven messages want 110 of 100 tokens."""
    result = mie("chat", stdin="Hi\n" * 7 + "/reset\nHi\n")
    assert result.exit_code == 0
    assert result.stderr.count("110 tokens; the model reads 100\n/reset starts a new") == 2
    assert [len(messages) for messages in llm.asked] == [1, 3, 5, 7, 9, 11, 11, 1]
    assert result.stdout == "Paris.\n" * 6


def test_a_template_that_refuses_leaves_the_chat_running(llm, monkeypatch):
    def refuse(messages):
        raise ChatTemplateError("the chat template refuses: roles must alternate")

    monkeypatch.setattr(llm, "chat_prompt", refuse)
    result = mie("chat", stdin="Hi\nHi\n")
    assert result.exit_code == 0
    assert result.stderr.count("roles must alternate") == 2


def test_a_cut_answer_says_by_what(llm):
    llm.finish_reason = "length"
    assert (
        "cut after 3 tokens (--max-tokens)" in mie("chat", "--max-tokens", "3", stdin="a\n").stderr
    )
    llm.max_context = 13
    assert "the context of 13 tokens is full" in mie("chat", stdin="Hi\n").stderr


def test_in_a_chat_an_answer_may_be_as_long_as_there_is_room(llm):
    """Else a question near the end of the memory would be refused for an answer nobody needs."""
    mie("chat", "--max-tokens", "75", stdin="Hi\nHi\n")
    assert [sampling.max_tokens for _, sampling in llm.prompts] == [75, 100 - 30]


def test_ctrl_c_keeps_what_was_said_and_the_chat(llm):
    llm.answers = [["Well, ", KeyboardInterrupt()], ["Yes"]]
    result = mie("chat", stdin="Hi\nGo on\n")
    assert result.exit_code == 0
    assert result.stdout == "Well, \nYes\n"
    assert roles(llm.asked[1]) == [("user", "Hi"), ("assistant", "Well, "), ("user", "Go on")]


def test_ctrl_c_at_the_prompt_says_how_to_leave_and_stays(llm, monkeypatch):
    """Not in a terminal: between two keys the line editor can miss a signal, as people know who
    press Ctrl-C twice."""
    lines = iter([KeyboardInterrupt(), "Hi", KeyboardInterrupt(), EOFError()])

    def read(conversation):
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("mie.terminal.conversation.Conversation._read", read)
    result = mie("chat")
    assert result.exit_code == 0
    assert result.stderr.count("/exit or Ctrl-D leaves") == 2
    assert len(llm.asked) == 1


CHAT_IN_A_TERMINAL = """
import os, select, signal
from mie import cli
from mie.engine.outputs import Piece

interrupted, wakeup = os.pipe()  # a signal is a byte in here, also one that comes before we wait
os.set_blocking(wakeup, False)
signal.set_wakeup_fd(wakeup)

class LLM:
    max_context = 100
    def chat_prompt(self, messages):
        self.messages = messages
        return [1]
    def stream(self, prompt, sampling):
        if len(self.messages) > 1:
            yield Piece(repr(self.messages[1]), 0, "stop")
            return
        for text in ("one ", "two "):
            yield Piece(text, 0)
        select.select([interrupted], [], [])  # thinks until it is interrupted

cli.load_llm = lambda *_: LLM()
cli.app(["chat"])
"""


class Terminal:
    """A program in a terminal of its own; reading waits for the text that is expected."""

    def __init__(self, program):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            # What runs in a script's background ignores SIGINT, and so would all that it starts.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.environ |= {"TERM": "dumb", "COLUMNS": "200"}
            os.execv(sys.executable, [sys.executable, "-c", program])
        self.seen = ""
        self.utf8 = codecs.getincrementaldecoder("utf-8")()  # a read may end inside a character

    def until(self, text):
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], 60)
            assert ready, f"{text!r} never came; so far {self.seen!r}"
            self.seen += self.utf8.decode(os.read(self.fd, 4096))
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text):
        os.write(self.fd, text.encode())

    def exit_code(self):
        try:
            while os.read(self.fd, 4096):
                pass
        except OSError:  # Linux says so when the other side has gone
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_in_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves():
    terminal = Terminal(CHAT_IN_A_TERMINAL)
    terminal.until("› ")
    terminal.type("Hi\n")
    terminal.until("one two ")
    terminal.type("\x03")  # while it thinks
    terminal.until("› ")
    terminal.type("What did you say?\n")
    terminal.until("{'role': 'assistant', 'content': 'one two '}")
    terminal.until("› ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0


# -- the other commands -------------------------------------------------------------------------


def test_check_lists_the_parts_with_their_rules():
    from mie import spec

    result = mie("check")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(spec.names())
    assert "What any RMSNorm must do." in result.stdout


def test_check_passes_the_engines_own_part():
    result = mie("check", "rms_norm")
    assert result.exit_code == 0 and "PASS" in result.stdout


@pytest.mark.parametrize(
    ("body", "state"),
    [("return x_TE", "FAIL"), ("raise NotImplementedError", "TODO")],
)
def test_check_runs_a_readers_file(tmp_path, body, state):
    (tmp_path / "mine.py").write_text(f"def norm(x_TE, weight_E, eps):\n    {body}\n")
    result = mie("check", "rms_norm", "--implementation", f"{tmp_path / 'mine.py'}:norm")
    assert result.exit_code == 1
    assert state in result.stdout and "mine.py:1" in result.stdout


def test_check_refuses_what_it_does_not_know():
    assert "no spec called 'nope'" in mie("check", "nope").stderr
    assert "there is no file nowhere.py" in mie("check", "rope", "-i", "nowhere.py:x").stderr


def test_models_tell_what_is_here(tmp_path, monkeypatch):
    monkeypatch.setenv("MIE_HOME", str(tmp_path))
    monkeypatch.setattr(cli, "_hugging_face_models", lambda: [("org/name", tmp_path / "hub")])
    assert "not fetched yet (93 MB)" in mie("models").stdout
    folder = tmp_path / "models" / "smollm2-135m"
    folder.mkdir(parents=True)
    (folder / packaged.MARK).write_bytes(packaged._mark(packaged.SMOLLM2_135M))
    result = mie("models")
    assert f"\n    {folder}\n" in result.stdout
    assert f"org/name\n    {tmp_path / 'hub'}\n" in result.stdout


def test_doctor_speaks_json_and_fails_on_a_problem(monkeypatch):
    from mie.terminal import doctor
    from mie.terminal.doctor import Finding, State

    findings = [Finding("a", State.OK, "fine"), Finding("b", State.NOTE, "so so", "do x")]
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    result = mie("doctor", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)[1] == {
        "topic": "b",
        "state": "note",
        "says": "so so",
        "advice": "do x",
    }
    findings.append(Finding("c", State.PROBLEM, "broken", "mend it"))
    result = mie("doctor")
    assert result.exit_code == 1
    assert "✗ c" in result.stdout and "→ mend it" in result.stdout


def test_doctor_can_fetch_the_model_first(monkeypatch):
    from mie.model import hub
    from mie.terminal import doctor

    asked = []
    monkeypatch.setattr(hub, "resolve", asked.append)
    monkeypatch.setattr(doctor, "examine", lambda: asked.append("examined") or [])
    assert mie("doctor", "--fetch").exit_code == 0
    assert asked == ["smollm2-135m", "examined"]


# -- the real thing -----------------------------------------------------------------------------


def test_the_real_model_answers_with_paris(smollm2_path):
    result = mie(
        "generate",
        "What is the capital of France?",
        "--model",
        str(smollm2_path),
        "--device",
        "cpu",
    )
    assert result.exit_code == 0
    assert result.stdout == "The capital of France is Paris.\n"


# -- mie bench throughput ------------------------------------------------------------------------


def bench_throughput(folder, *options):
    few = ("--requests", "2", "--max-num-seqs", "2", "--alone", "1", "--device", "cpu")
    return mie("bench", "throughput", "--model", str(folder), *few, *map(str, options))


def test_throughput_is_a_table_and_a_trace(small_path, tmp_path):
    trace = tmp_path / "trace.json"
    result = bench_throughput(small_path, "--trace", trace)
    assert result.exit_code == 0, result.stderr
    for name in ("one at a time", "static", "continuous"):
        assert name in " ".join(result.stdout.split())
    assert json.loads(trace.read_text("utf-8"))["traceEvents"]


def test_throughput_as_json_is_nothing_but_json(small_path):
    result = bench_throughput(small_path, "--json", "-")
    assert result.exit_code == 0, result.stderr
    runs = json.loads(result.stdout)["throughput"]["runs"]
    assert [run["num_requests"] for run in runs] == [1, 2, 2]
    assert runs[-1]["padding_tokens"] == 0


@pytest.mark.parametrize("option", ["--json", "--trace"])
def test_throughput_refuses_a_missing_folder_before_the_work(tmp_path, option):
    result = bench_throughput(tmp_path / "no-model", option, tmp_path / "nowhere" / "file")
    assert result.exit_code == 2 and "there is no folder" in " ".join(result.stderr.split())


def test_throughput_refuses_a_folder_without_a_model(tmp_path):
    result = bench_throughput(tmp_path)
    assert result.exit_code == 1 and result.stdout == ""


def test_throughput_has_help():
    result = mie("bench", "throughput", "--help")
    assert result.exit_code == 0 and "Tokens a second" in result.stdout
