"""The engine in a terminal, as ``mie.cli`` needs it: answers, conversations, the doctor."""
