"""`shardstep demo`: the same small GPT trained with DDP + AdamW and with shardstep, and what differs.

In the order in which a run goes through them:

- `settings.py`   what can be chosen, and every way in which it can be wrong
- `launch.py`     starts the ranks under torchrun, follows them, stops them, says which one failed
- `worker.py`     one rank: trains twice, compares the parameters, measures memory and bytes sent
- `gpt.py`        the model;  `corpus.py` the text as batches
- `exchange.py`   the folder through which rank 0 tells the command how far it is and what came out
- `progress.py`   how far it is, drawn as bars or written as a few lines
- `result.py`     what came out
- `engine/report.py`     the table;  `picture.py` the picture of memory per rank

`harbour.txt` is the text the model learns; `make_text.py` wrote it and writes it again, byte for byte.
"""
