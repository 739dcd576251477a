"""Chat completions: the request, the prompt of an answer from documents, the answer, its citation markers."""
