"""Three workloads that other engines have been measured on: for numbers that can be compared.

Invariant: a workload is the same list of token ids and answer lengths wherever it is made, drawn
with ``random.Random(0)`` in a fixed order. How many tokens go in and come out is known before:

    name      requests   in        out       drawn
    nano      256        142,827   133,966   all prompts, 100 … 1,024 tokens; then all lengths
    chat      1,000      173,968   198,272   a prompt, its length; lognormal, cut to 4 … 1,024
    single    1          128       256       nothing but the prompt's tokens

Answers do not end early (``ignore_eos``) and are drawn at temperature 0.6, so that every engine
computes as many tokens. Sources: nano is the benchmark of nano-vllm; chat has the shape of the
ShareGPT trace that vLLM's benchmarks take.

Unlike ``mie.bench.workloads``, the draws are those of the measurements to compare with: ``randint``
and ``lognormvariate``, whose sequence Python does not promise. The counts above are tested.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from mie.errors import ConfigError
from mie.request import Request
from mie.sampling_params import SamplingParams

TEMPERATURE = 0.6
MAX_MODEL_LEN = 4096  # that all engines were given
HIGHEST_TOKEN = 10_000


@dataclass(frozen=True)
class StandardWorkload:
    """Prompts as token ids, and how long each answer is. ``max_num_seqs`` run at once unless told
    otherwise. ``part`` says what was left out: nothing, in a workload as it stands."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[int, ...]
    max_num_seqs: int
    part: str = ""

    @property
    def title(self) -> str:
        return f"{self.name}, {self.part}" if self.part else self.name

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """(prompt, answer) in tokens, request by request."""
        return [(len(p), answer) for p, answer in zip(self.prompts, self.answers, strict=True)]

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.answers)

    def limited(
        self, num_requests: int | None = None, tokens: int | None = None
    ) -> StandardWorkload:
        """The first ``num_requests``, prompts and answers cut to ``tokens``: to try something out.

        What it measures is comparable with nothing; ``title`` says so. Raises ConfigError for
        less than one request or token.
        """
        for name, value in (("num_requests", num_requests), ("tokens", tokens)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; a workload has at least 1")
        kept = len(self.prompts) if num_requests is None else num_requests
        words = [f"first {kept} requests"] if kept < len(self.prompts) else []
        words += [f"cut to {tokens} tokens"] if tokens is not None else []
        return replace(
            self,
            prompts=tuple(prompt[:tokens] for prompt in self.prompts[:kept]),
            answers=tuple(n if tokens is None else min(n, tokens) for n in self.answers[:kept]),
            part=", ".join(words),
        )

    def requests(self, run: str) -> list[Request]:
        """What to give to an engine. ``run`` names them, and keeps their prompts apart from those
        of other runs: a prefix cache finds nothing that this run has not computed."""
        return [
            Request(
                f"{run}-{number}",
                prompt,
                SamplingParams(answer, TEMPERATURE, seed=number, ignore_eos=True),
                salt=run,
            )
            for number, (prompt, answer) in enumerate(zip(self.prompts, self.answers, strict=True))
        ]


def nano() -> StandardWorkload:
    """256 requests, evenly between 100 and 1,024 tokens in and out."""
    rng = Random(0)
    prompts = tuple(_tokens(rng, rng.randint(100, 1024)) for _ in range(256))
    return StandardWorkload("nano", prompts, tuple(rng.randint(100, 1024) for _ in prompts), 256)


def chat() -> StandardWorkload:
    """1,000 requests, most of them short and a few long."""
    rng = Random(0)
    prompts, answers = [], []
    for _ in range(1000):
        prompts.append(_tokens(rng, _lognormal(rng, 4.5, 1.2)))
        answers.append(_lognormal(rng, 4.9, 0.9))
    return StandardWorkload("chat", tuple(prompts), tuple(answers), 1024)


def single() -> StandardWorkload:
    """One request: how long one person waits for a token."""
    return StandardWorkload("single", (_tokens(Random(0), 128),), (256,), 1)


WORKLOADS = {"nano": nano, "chat": chat, "single": single}


def standard_workload(name: str) -> StandardWorkload:
    """The workload of that name. Raises ConfigError, with all names, if there is none."""
    if name not in WORKLOADS:
        raise ConfigError(f"no workload called {name!r}; there are {', '.join(WORKLOADS)}")
    return WORKLOADS[name]()


def _tokens(rng: Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randint(0, HIGHEST_TOKEN) for _ in range(count))


def _lognormal(rng: Random, mean: float, deviation: float) -> int:
    return max(4, min(1024, int(rng.lognormvariate(mean, deviation))))
