"""How an engine serves a trace of requests: how fast, how soon, and where the time goes.

trace     when requests arrive and how long they are
clock     the time, with the waiting left out
replay    runs a trace, and notes when every token came
report    what came of it
document  the same as JSON
"""
