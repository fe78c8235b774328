"""How the shipped drafters are made: the target writes texts, drafters learn from them, `python -m specviz.train`."""
