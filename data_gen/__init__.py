"""Stages that write data: pairs, judgements, traces, curated examples."""
