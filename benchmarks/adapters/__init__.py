"""Training jobs of the frameworks, each saving by Holdfast's adapter and by the framework's own way, in turns.

    python -m benchmarks.adapters.JOB FOLDER ROUNDS      prints a line of JSON for each turn

They run with the frameworks' own interpreter; `benchmarks.cases.adapters` starts them.
"""
