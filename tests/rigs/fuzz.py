"""Ten thousand malformed requests against the real server: none may be answered with 500, hang, leak or hurt others.

Three sources: the twenty-seven kinds of bad input with their exact answers, schemathesis on the document that the
server serves, and good requests damaged in body or head, drawn from a seed. Between them a good request always has to
give the same tokens. At the end of a run a fault is planted, which has to be found.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import copy
import dataclasses
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from jaxserve.server.params import TIMEOUT_HEADER
from tests.rigs import bad_inputs, bad_states, largest, verdict
from tests.rigs.bad_inputs import CHAT, GENERATE, TEXT, TURNS, Row
from tests.rigs.exchange import Answer, exchange, request
from tests.rigs.faulty import WORD
from tests.rigs.judge import Judge, error_faults
from tests.rigs.mutate import mutate_bytes, mutate_head, mutate_tree
from tests.rigs.served import Served, served

CASES, QUICK = 10_000, 400
PATIENCE = 2.0
MOST_GROWTH = 50 << 20

SHOWN = 20  # of the faults that are found; all of them are counted
AT_ONCE = 6  # far below what the server admits: a 503 would be a fault
# Short answers, and short waits for what never comes: the rest of a head or a body.
OUTPUT = 16
FLAGS = (
    "--engine.max-output-tokens",
    str(OUTPUT),
    "--server.header-timeout-s",
    "0.5",
    "--server.body-timeout-s",
    "0.5",
)
VOCAB = 400
CANARY = {"prompt": "The capital of France", "max_tokens": 12, "temperature": 0, "logprobs": 2, "ignore_eos": True}
CHECKS = "all"
EXCLUDED = "positive_data_acceptance"  # what is too long for this model is refused, and the document knows no model

GOOD: dict[str, tuple[dict[str, Any], ...]] = {
    CHAT: (
        {"messages": TURNS, "max_tokens": 3},
        {
            "model": "tiny",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]},
                {"role": "assistant", "content": "Hi", "name": "a"},
                {"role": "user", "content": "And now?"},
            ],
            "max_completion_tokens": 4,
            "temperature": 0.7,
            "top_p": 0.9,
            "seed": 5,
            "n": 2,
            "stop": ["\n", "END"],
            "logprobs": True,
            "top_logprobs": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        {"messages": TURNS, "max_tokens": 2, "chat_template_kwargs": {"enable_thinking": False}, "min_tokens": 1},
        {
            "messages": TURNS,
            "max_tokens": 2,
            "parallel": {"mode": "auto", "trace": "steps", "stream": "committed"},
            "prediction": {"type": "content", "content": [{"type": "text", "text": "Hello"}]},
        },
    ),
    TEXT: (
        {"prompt": "Hello", "max_tokens": 3},
        {
            "prompt": ["Hello", "you"],
            "max_tokens": 4,
            "logit_bias": {"5": 1, "7": -100},
            "stop": "x",
            "logprobs": 2,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.1,
            "stream": True,
        },
        {"prompt": [[1, 2, 3], [4, 5]], "max_tokens": 2, "n": 2, "top_k": 5, "min_p": 0.1, "stop_token_ids": [2]},
    ),
    GENERATE: (
        {"prompt": "Hello", "max_tokens": 3},
        {"prompt": [5, 6, 7], "max_tokens": 3, "stream": True, "seed": -1, "ignore_eos": True, "logprobs": 1},
    ),
    "/tokenize": (
        {"prompt": "Hello", "add_special_tokens": True, "return_token_strs": True},
        {"messages": TURNS, "add_generation_prompt": False, "continue_final_message": False},
    ),
    "/detokenize": ({"tokens": [5, 6, 7], "model": "tiny"},),
}
GETS = ("/v1/models", "/v1/models/tiny", "/livez", "/readyz", "/health", "/metrics", "/openapi.json")


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One request; ``row`` if its exact answer is known. A damaged head may not be HTTP, so no answer is an answer."""

    name: str
    method: str
    path: str
    data: bytes
    row: Row | None = None
    parsable: bool = True


@dataclasses.dataclass(slots=True)
class Tally:
    """What was seen.

    Attributes:
        cases: requests that were judged.
        statuses, codes: how often each was answered.
        faults: what was wrong, with the request in base64.
        slowest: seconds of the slowest answer.
        canaries: good requests in between.
    """

    cases: int = 0
    statuses: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    codes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    faults: list[dict[str, str]] = dataclasses.field(default_factory=list)
    slowest: float = 0.0
    canaries: int = 0

    def count(self, answer: Answer) -> None:
        """Counts one answer."""
        self.statuses[answer.status] += 1
        self.slowest = max(self.slowest, answer.seconds)
        if answer.status >= 400:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self.codes[answer.json()["error"]["code"]] += 1

    def note(self, name: str, data: bytes, faults: Sequence[str]) -> None:
        """Keeps what is wrong with one answer."""
        for fault in faults:
            self.faults.append({"case": name, "fault": fault, "request": base64.b64encode(data[:3000]).decode()})
            if len(self.faults) <= SHOWN:
                print(f"{name}: {fault[:200]}", flush=True)


# --- cases ------------------------------------------------------------------------------------------------------------


def row_cases(rows: Sequence[Row]) -> Iterator[Case]:
    """Bad inputs with known answers."""
    for row in rows:
        body = None if row.body is None else row.content
        yield Case(f"row {row}", row.method, row.path, request(row.method, row.path, body, row.headers), row)


def damaged(
    seed: int, fields: Mapping[str, Any], good: Mapping[str, tuple[dict[str, Any], ...]] = GOOD
) -> Iterator[Case]:
    """Good requests with something wrong, without end."""
    bodies = [json.dumps(tree).encode() for trees in good.values() for tree in trees]
    for number in range(sys.maxsize):
        draw = random.Random(f"{seed}-{number}")
        path = draw.choice(list(good))
        tree, kind = draw.choice(good[path]), draw.random()
        name = f"damaged {seed}-{number} {path}"
        if kind < 0.65:
            yield Case(name, "POST", path, request("POST", path, mutate_tree(draw, tree, fields)))
        elif kind < 0.83:
            body = mutate_bytes(draw, json.dumps(tree).encode(), bodies)
            yield Case(name, "POST", path, request("POST", path, body))
        elif draw.random() < 0.7:
            data = mutate_head(draw, request("POST", path, json.dumps(tree).encode()))
            yield Case(name, "POST", path, data, parsable=False)
        else:
            path = draw.choice(GETS)
            data = request("GET", path)
            data = mutate_head(draw, data) if draw.random() < 0.7 else mutate_bytes(draw, data)
            yield Case(f"damaged {seed}-{number} {path}", "GET", path, data, parsable=False)


def largest_cases() -> Iterator[Case]:
    """Good requests that cost as much as one can."""
    for name, (path, body) in largest.CASES.items():
        yield Case(f"largest: {name}", "POST", path, request("POST", path, body))


def fields_of(document: dict[str, Any]) -> dict[str, Any]:
    """Every field that a request may have, each with a good value where one is known."""
    schemas = document["components"]["schemas"]
    names = {name for kind, schema in schemas.items() if "Request" in kind for name in schema["properties"]}
    known = {name: value for trees in GOOD.values() for tree in trees for name, value in tree.items()}
    return {name: known.get(name) for name in sorted(names)}


def row_faults(row: Row, answer: Answer) -> list[str]:
    """How an answer differs from the one that is right."""
    found = [] if answer.status == row.status else [f"status {answer.status}, not {row.status}"]
    for name, value in row.answers:
        given = answer.headers.get(name)
        if given != value and not (value == "*" and given):
            found.append(f"header {name} is {given!r}, not {value!r}")
    if row.status >= 400 and not found:
        error = answer.json()["error"]
        wanted = {"type": row.type, "code": row.code or error["code"], "param": row.param}
        found += [f"{name} is {error[name]!r}, not {value!r}" for name, value in wanted.items() if error[name] != value]
    return found


# --- asking -----------------------------------------------------------------------------------------------------------


class Fuzzer:
    """Asks one server, many requests at once, and judges what it answers."""

    def __init__(self, url: str, patience: float = PATIENCE) -> None:
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        self.url = url
        self.tally = Tally()
        self.document = httpx2.get(url + "/openapi.json", timeout=30).json()
        self._judge = Judge(self.document, patience)
        self._address = (parts.hostname, parts.port)
        self._patience = patience
        self._expected = self._good_answer()

    def run(self, cases: Iterator[Case], count: int, at_once: int = AT_ONCE) -> None:
        """Asks up to ``count`` of them."""
        asyncio.run(self._run(cases, count, at_once))

    def canary(self) -> None:
        """A good request: its tokens must be those of the first one."""
        self.tally.canaries += 1
        try:
            found = self._good_answer()
        except (httpx2.HTTPError, KeyError, ValueError) as error:
            self.tally.note("canary", b"", [f"no good answer: {type(error).__name__}"])
            return
        if found != self._expected:
            self.tally.note("canary", b"", [f"other tokens: {found}"])

    def _good_answer(self) -> Any:
        return httpx2.post(self.url + GENERATE, json=CANARY, timeout=30).json()["logprobs"]

    async def _run(self, cases: Iterator[Case], count: int, at_once: int) -> None:
        slow: list[Case] = []
        left = iter(range(count))

        async def worker() -> None:
            for number in left:
                case = next(cases, None)
                if case is None:
                    return
                await self._ask(case, slow)
                if number % 100 == 99:
                    await asyncio.to_thread(self.canary)

        await asyncio.gather(*(worker() for _ in range(at_once)))
        for case in slow:  # once more and alone: it may have been the machine
            self.tally.cases -= 1
            await self._ask(case, None)

    async def _ask(self, case: Case, slow: list[Case] | None) -> None:
        answer = await exchange(self._address, case.data, self._patience + 1)
        self.tally.cases += 1
        late = not answer.in_time or answer.seconds > self._patience
        # A head that the machine kept back for half a second is cut off without a word: the waits here are short.
        unanswered = case.parsable and answer.status == 0
        if slow is not None and (late or unanswered):
            slow.append(case)
            return
        self.tally.count(answer)
        faults = self._judge.faults(case.method, case.path, case.data, answer, parsable=case.parsable)
        if case.row is not None and not faults:
            faults = row_faults(case.row, answer)
        self.tally.note(case.name, case.data, faults)

    # --- schemathesis -------------------------------------------------------------------------------------------------

    def schemathesis(self, examples: int, seed: int) -> None:
        """Lets schemathesis ask what the document says, and judges every answer that it got.

        Once by the document as it is served. Then without a client's own timeout, of which schemathesis gives a few
        milliseconds to every third request, so that nothing of it is read.
        """
        with tempfile.TemporaryDirectory() as folder:
            document = copy.deepcopy(self.document)
            for operations in document["paths"].values():
                for operation in operations.values():
                    operation["parameters"] = [
                        at for at in operation.get("parameters", ()) if at["name"] != TIMEOUT_HEADER
                    ]
            patient = Path(folder, "openapi.json")
            patient.write_text(json.dumps(document))
            self._schemathesis(Path(folder), self.url + "/openapi.json", "fuzzing", examples // 8 + 1, seed)
            self._schemathesis(Path(folder), str(patient), "examples,coverage,fuzzing", examples, seed)

    def _schemathesis(self, folder: Path, document: str, phases: str, examples: int, seed: int) -> None:
        program = Path(sys.executable).with_name("schemathesis")
        report, log = folder / "events.ndjson", folder / "log"
        command = [str(program), "run", document, "--url", self.url, "--seed", str(seed)]
        command += ["--max-examples", str(examples), "--phases", phases]
        command += ["--checks", CHECKS, "--exclude-checks", EXCLUDED]
        command += ["--generation-database", "none", "--continue-on-failure", "--no-shrink", "--no-color"]
        command += ["--report", "ndjson", "--report-ndjson-path", str(report), "--output-sanitize", "false"]
        command += ["--request-timeout", "30", "--suppress-health-check", "all"]
        with log.open("w") as file:
            child = subprocess.Popen(command, cwd=folder, stdout=file, stderr=subprocess.STDOUT)
            while child.poll() is None:
                self.canary()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(2)
        if child.returncode not in (0, 1) or not report.exists():
            raise RuntimeError(f"schemathesis could not run:\n{log.read_text()[-3000:]}")
        self._judge_report(report)
        report.unlink()

    def _judge_report(self, report: Path) -> None:
        for line in report.open():
            event = json.loads(line).get("ScenarioFinished")
            if event is not None:
                self._judge_scenario(event["recorder"])

    def _judge_scenario(self, recorder: dict[str, Any]) -> None:
        for case, interaction in recorder.get("interactions", {}).items():
            asked, answered = interaction["request"], interaction["response"]
            path = urlsplit(asked["uri"]).path
            name = f"schemathesis {asked['method']} {path[:80]}"
            sent = _bytes(asked.get("body"))
            self.tally.cases += 1
            failed = [check for check in recorder.get("checks", {}).get(case, ()) if check["status"] == "failure"]
            if answered is not None and answered["status_code"] == 503 and self._judge.is_probe(path):
                failed = []
            if answered is not None and answered["status_code"] == 408:  # too late to be read is refused well enough
                failed = [check for check in failed if check["name"] != "negative_data_rejection"]
            status = answered["status_code"] if answered else 0
            faults = [f"{check['name']} at {status}: {_reason(check)}" for check in failed]
            if answered is None:
                faults.append("no answer")
            else:
                headers = {name.lower(): values[-1] for name, values in answered["headers"].items()}
                answer = Answer(
                    status=answered["status_code"],
                    headers=headers,
                    body=_bytes(answered["content"]),
                    seconds=answered["elapsed"],
                    complete=True,
                    in_time=True,
                )
                self.tally.count(answer)
                faults += self._judge.faults(asked["method"], path, sent, answer)
            self.tally.note(name, sent, faults)


def _bytes(content: Any) -> bytes:
    if isinstance(content, dict):
        return base64.b64decode(content.get("$base64", ""))
    return (content or "").encode()


def _reason(check: dict[str, Any]) -> str:
    failure = check.get("failure_info") or check.get("failure") or check
    return json.dumps(failure)[:300]


# --- the run ----------------------------------------------------------------------------------------------------------


def check_process(server: Served, before: tuple[int, int, int], tally: Tally) -> dict[str, int]:
    """Whether the server is as it was: memory, descriptors, threads, and a log of whole lines without a traceback."""
    time.sleep(1.5)  # the last connections close
    after = (server.rss(), server.fds(), server.threads())
    growth = after[0] - before[0]
    if growth > MOST_GROWTH:
        tally.note("process", b"", [f"grew by {growth >> 20} MB"])
    if after[1] > before[1] + 5:
        tally.note("process", b"", [f"{after[1]} descriptors, {before[1]} before"])
    if after[2] > before[2] + 5:
        tally.note("process", b"", [f"{after[2]} threads, {before[2]} before"])
    for line in server.lines:
        try:
            record = json.loads(line)
        except ValueError:
            tally.note("log", line.encode(), ["a line that is not JSON"])
            continue
        if record.get("level") in ("error", "critical"):
            tally.note("log", line.encode(), [f"an error: {record.get('message')}"])
    return {"growth_bytes": growth, "descriptors": after[1] - before[1], "threads": after[2] - before[2]}


def fuzz(server: Served, cases: int, seed: int, *, quick: bool) -> tuple[Tally, dict[str, Any]]:
    """All three sources against one server; schemathesis alone asks too much for a quick run."""
    fuzzer = Fuzzer(server.url)
    card = httpx2.get(server.url + "/v1/models", timeout=30).json()["data"][0]
    rows = bad_inputs.rows(bad_inputs.Model(VOCAB, card["max_model_len"], OUTPUT, 4 << 20))
    rows += [row for path in (CHAT, TEXT, GENERATE) for row in bad_inputs.number_rows(path)]
    for _ in range(20):
        fuzzer.canary()
    before = (server.rss(), server.fds(), server.threads())
    sources: dict[str, int] = {}
    for name, run in (
        ("rows", lambda: fuzzer.run(row_cases(rows), min(len(rows), cases // 2))),
        ("schemathesis", lambda: None if quick else fuzzer.schemathesis(max(cases // 45, 5), seed)),
        ("damaged", lambda: fuzzer.run(damaged(seed, fields_of(fuzzer.document)), cases - fuzzer.tally.cases)),
    ):
        earlier = fuzzer.tally.cases
        run()
        sources[name] = fuzzer.tally.cases - earlier
        print(f"{name}: {sources[name]} cases, {server.rss() >> 20} MB", flush=True)
    fuzzer.canary()
    return fuzzer.tally, {"sources": sources, **check_process(server, before, fuzzer.tally)}


def fuzz_states(tally: Tally) -> None:
    """The rows that need a server of their own: with keys, full, failing."""
    for row, data, answer in bad_states.ask_all(PATIENCE + 1):
        tally.cases += 1
        shape = error_faults(data, answer) if answer.status >= 400 else []
        tally.note(f"row {row}", data, row_faults(row, answer) + shape)


def fuzz_largest(tally: Tally) -> dict[str, Any]:
    """The costliest bodies, one at a time, on a server of their own, and what they leave in its memory."""
    with served("--engine.max-output-tokens", str(OUTPUT)) as server:
        fuzzer = Fuzzer(server.url)
        fuzzer.tally = tally
        before, cases = server.rss(), tally.cases
        fuzzer.run(largest_cases(), len(largest.CASES), at_once=1)
        growth = server.rss() - before
        if growth > largest.MOST_GROWTH:
            tally.note("largest", b"", [f"grew by {growth >> 20} MB"])
        print(f"largest: {tally.cases - cases} cases, {server.rss() >> 20} MB", flush=True)
        return {"largest_growth_bytes": growth}


def planted(server: Served, seed: int, cases: int = 150) -> int:
    """How many faults are found in a server whose checks fail on one word."""
    good = {GENERATE: ({"prompt": WORD, "max_tokens": 2},), "/detokenize": GOOD["/detokenize"]}
    print("what follows is planted, and has to be found:", flush=True)
    fuzzer = Fuzzer(server.url)
    server.control("fail", phase="validate", marked=True)
    fuzzer.run(damaged(seed, {}, good), cases)
    return len(fuzzer.tally.faults)


def main() -> None:
    """Runs, and says what was seen."""
    args = verdict.arguments(__doc__, seed={"type": int, "default": 1}, cases={"type": int, "default": CASES})
    begin = time.monotonic()
    with served(*FLAGS, faulty=args.quick) as server:
        tally, details = fuzz(server, QUICK if args.quick else args.cases, args.seed, quick=args.quick)
        found = planted(server, args.seed) if args.quick else 0
    if not args.quick:
        fuzz_states(tally)
        details |= fuzz_largest(tally)
        with served(*FLAGS, faulty=True) as server:
            found = planted(server, args.seed)
    statuses = {str(status): count for status, count in sorted(tally.statuses.items())}
    verdict.report(
        "fuzz",
        figure=f"{tally.cases:,} malformed requests, {len(tally.faults)} wrong answers, slowest {tally.slowest:.1f} s,"
        f" {details['growth_bytes'] / 2**20:+.0f} MB; a planted fault {'found' if found else 'NOT found'}",
        held=not tally.faults and found > 0,
        details=details
        | {"seed": args.seed, "statuses": statuses, "faults": tally.faults[:50], "canaries": tally.canaries}
        | {
            "codes": dict(tally.codes.most_common()),
            "planted_found": found,
            "seconds": round(time.monotonic() - begin),
        },
        save=args.save,
    )


if __name__ == "__main__":
    main()
