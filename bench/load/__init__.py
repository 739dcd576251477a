"""Many sessions at once for minutes: latency by kind of call, errors, memory, cancellation (``make load-test``)."""
