"""Measuring policies: x1, x4 and long, Pass@1 with intervals, behaviour, reports."""
