"""Stands below every room: settings, telemetry, processes, files, and the errors that goaly raises on purpose."""
