"""Checks everything that serving needs on this machine, with a fix for each problem."""
