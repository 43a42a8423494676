"""The command line: one file per verb, each verb a question. Takes no decision that Python code cannot take too."""
