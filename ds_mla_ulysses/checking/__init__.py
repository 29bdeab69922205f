"""`ds-mla-ulysses check`: compares a small model of an architecture on several processes with one process.

| file         | what                                                                                  |
|--------------|---------------------------------------------------------------------------------------|
| `report.py`  | the Report and its table                                                              |
| `request.py` | what is asked of the worker, as JSON                                                  |
| `recipe.py`  | a small config and a small model of any architecture                                  |
| `facts.py`   | what some model types need beyond the recipe                                          |
| `cases.py`   | the batches that are compared, and the reference in one process                       |
| `compare.py` | what one rank does                                                                    |
| `ranks.py`   | a group of rank processes: started, watched, and replaced after a failure             |
| `worker.py`  | the process that has imported everything and from which the rank processes are forked |
| `run.py`     | `check`, and the worker as its callers see it                                         |
"""
