"""Forecasts of a run: its real schedule in virtual time, with service times from a measured profile."""
