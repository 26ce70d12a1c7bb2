"""`python -I -m mlx_mesh.proxy.grammar_child`: says what is wrong with the grammar on standard input.

A process of its own, because compiling recurses as deep as the grammar is: what overflows the stack here
would have ended the front end. Its stack is smaller than an engine's, so what passes here passes there.
Prints the problem, or nothing. Ends by itself when it takes too long, whoever started it.
"""

from __future__ import annotations

import signal
import sys
import threading

from llguidance import LLMatcher

STACK_BYTES = 2 * 1024 * 1024
LIFE_S = 20


def main() -> int:
    signal.alarm(LIFE_S)
    grammar = sys.stdin.buffer.read().decode()
    problems: list[str] = []
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: problems.append(problem_of(grammar)))
    thread.start()
    thread.join()
    if not problems:
        return 1
    sys.stdout.buffer.write(problems[0].encode())
    return 0


def problem_of(grammar: str) -> str:
    """'' or what is wrong. Ends the process for a grammar that is too deep."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return messages[0].strip() if is_error else ""


if __name__ == "__main__":
    sys.exit(main())
