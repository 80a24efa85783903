"""What a run can do: one module per task, each with ``run(session) -> result``."""
