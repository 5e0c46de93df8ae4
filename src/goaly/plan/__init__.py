"""Plans: what a run or an update of the weights would need, before anything is started."""
