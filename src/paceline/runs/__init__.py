"""Run trainings, rehearsals and plans: sessions, folders, launching, restarts."""
