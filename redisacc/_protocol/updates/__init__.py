"""Updates: an optimizer makes a version of the parameters of each round, part by part, where the sums are."""
