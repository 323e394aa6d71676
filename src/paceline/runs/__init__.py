"""Run trainings, rehearsals (on emulated devices) and plans; launch and restart processes."""
