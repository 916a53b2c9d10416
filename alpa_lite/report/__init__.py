"""Plans and planning as text: the printout, explanations, differences, progress, and dumps of every stage."""
