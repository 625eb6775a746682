"""Stages that measure: detection, debiasing, the report."""
