"""The CSD paper's evaluation as one command: the same prompts and seeds for every preset, metrics, tests, a report.

`prompts` reads captions, `generate` draws (resumable, in processes or on Ray), `metrics` scores with torch, `regions`
says where drafts are accepted, `statistics` what can be told apart from chance, `report` writes table and HTML.
"""
