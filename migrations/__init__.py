"""How the tables came to be: Alembic revisions, written by hand as SQL. At the root: `alembic upgrade head`."""
