"""`shardstep demo`: the same small GPT trained with DDP + AdamW and with shardstep, and what differs.

In the order in which a run goes through them:

- `settings.py`   what can be chosen, and every way in which it can be wrong
- `launch.py`     starts the ranks under torchrun, follows them, stops them, says which one failed
- `worker.py`     one rank: trains twice, compares the parameters, measures memory and bytes sent
- `gpt.py`        the model;  `make_text.py` the text it learns;  `corpus.py` that text as batches
- `exchange.py`   the folder through which rank 0 tells the command how far it is and what came out
- `progress.py`   how far it is, drawn as bars or written as a few lines
- `result.py`     what came out
- `report.py`     the table;  `picture.py` the picture of memory per rank
"""
