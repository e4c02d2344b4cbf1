-- Runs that waited for workers are interrupted, and can be resumed. Tokens of workers may still read.
UPDATE run SET state = 'interrupted', finished = CURRENT_TIMESTAMP WHERE state = 'running' AND id IN (SELECT run_id FROM task);
UPDATE token SET scopes = 'submit' WHERE scopes = 'submit work';
UPDATE token SET scopes = 'read' WHERE scopes = 'work';
DROP TABLE late;
DROP TABLE upload;
DROP TABLE lease;
DROP TABLE task;
DROP TABLE worker;
CREATE TABLE submission (
    id INTEGER NOT NULL, run_id INTEGER NOT NULL, suite TEXT NOT NULL, fingerprint VARCHAR(64) NOT NULL,
    again TEXT NOT NULL, claim VARCHAR(32), host TEXT NOT NULL, seen DATETIME, running TEXT NOT NULL,
    tries INTEGER NOT NULL, reason TEXT NOT NULL,
    CONSTRAINT pk_submission PRIMARY KEY (id),
    CONSTRAINT fk_submission_run_id_run FOREIGN KEY(run_id) REFERENCES run (id),
    CONSTRAINT uq_submission_run_id UNIQUE (run_id)
);
ALTER TABLE cell ADD COLUMN extra TEXT DEFAULT '' NOT NULL;
-- Runs are whole. They are ordered by their ids, and no longer by their start.
ALTER TABLE run ADD COLUMN whole VARCHAR(40) DEFAULT '' NOT NULL;
UPDATE run SET whole = name;
CREATE INDEX ix_run_whole ON run (whole);
DROP INDEX ix_run_started;
CREATE TABLE newest (
    cell_id INTEGER NOT NULL, run_id INTEGER NOT NULL, result_id INTEGER, versions TEXT NOT NULL,
    CONSTRAINT pk_newest PRIMARY KEY (cell_id),
    CONSTRAINT fk_newest_cell_id_cell FOREIGN KEY(cell_id) REFERENCES cell (id),
    CONSTRAINT fk_newest_result_id_result FOREIGN KEY(result_id) REFERENCES result (id),
    CONSTRAINT fk_newest_run_id_cell_id_planned FOREIGN KEY(run_id, cell_id) REFERENCES planned (run_id, cell_id)
);
ALTER TABLE result ADD COLUMN flaky INTEGER DEFAULT '0' NOT NULL;
ALTER TABLE result ADD COLUMN known INTEGER DEFAULT '0' NOT NULL;
CREATE TABLE figure (
    result_id INTEGER NOT NULL, name VARCHAR(100) NOT NULL, nodeid_id INTEGER NOT NULL, value FLOAT NOT NULL,
    unit VARCHAR(40) NOT NULL, better VARCHAR(6),
    CONSTRAINT pk_figure PRIMARY KEY (result_id, name),
    CONSTRAINT fk_figure_nodeid_id_nodeid FOREIGN KEY(nodeid_id) REFERENCES nodeid (id),
    CONSTRAINT fk_figure_result_id_result FOREIGN KEY(result_id) REFERENCES result (id)
) WITHOUT ROWID;
