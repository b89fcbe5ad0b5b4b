"""Fault injection: worker processes that serve requests over seeded pages, without a model, and what is done to them.

FaultRun (this process)   queue, chunks, decode steps, aborts, kills, stops, and what must hold
  PrefillGroup            rank processes: real page senders over pools that are filled from seeds
  DecodeHost              a decode process: the real receiver, and a reader that knows every byte
"""
