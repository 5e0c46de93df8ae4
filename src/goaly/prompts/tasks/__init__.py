"""Built-in tasks: each makes problems, writes demonstrations and verifies answers. They use no files and no network."""
