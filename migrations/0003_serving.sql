-- Approximate skips.

-- NULL where it was not measured.
ALTER TABLE requests ADD COLUMN kl REAL;
