-- The schema of 0.1.0 and 0.2.0, as SQLite has it.

CREATE TABLE cell (
    id INTEGER NOT NULL, name VARCHAR(200) NOT NULL, python VARCHAR(40) NOT NULL,
    transformers VARCHAR(40) NOT NULL, torch VARCHAR(40) NOT NULL, flash_attention VARCHAR(20) NOT NULL,
    device VARCHAR(20) NOT NULL,
    CONSTRAINT pk_cell PRIMARY KEY (id),
    CONSTRAINT uq_cell_name UNIQUE (name)
);
CREATE TABLE nodeid (
    id INTEGER NOT NULL, digest VARCHAR(32) NOT NULL, name TEXT NOT NULL,
    CONSTRAINT pk_nodeid PRIMARY KEY (id),
    CONSTRAINT uq_nodeid_digest UNIQUE (digest)
);
CREATE TABLE shared_text (
    id INTEGER NOT NULL, digest VARCHAR(32) NOT NULL, content BLOB NOT NULL,
    CONSTRAINT pk_shared_text PRIMARY KEY (id),
    CONSTRAINT uq_shared_text_digest UNIQUE (digest)
);
CREATE TABLE run (
    id INTEGER NOT NULL, name VARCHAR(40) NOT NULL, started DATETIME NOT NULL, finished DATETIME,
    state VARCHAR(40) NOT NULL, label TEXT NOT NULL, command TEXT NOT NULL, host TEXT NOT NULL,
    revision TEXT NOT NULL, axes_id INTEGER, partial BOOLEAN DEFAULT 0 NOT NULL,
    CONSTRAINT pk_run PRIMARY KEY (id),
    CONSTRAINT fk_run_axes_id_shared_text FOREIGN KEY(axes_id) REFERENCES shared_text (id),
    CONSTRAINT uq_run_name UNIQUE (name)
);
CREATE INDEX ix_run_started ON run (started);
CREATE TABLE planned (
    run_id INTEGER NOT NULL, cell_id INTEGER NOT NULL, position INTEGER NOT NULL, excluded TEXT,
    CONSTRAINT pk_planned PRIMARY KEY (run_id, cell_id),
    CONSTRAINT fk_planned_cell_id_cell FOREIGN KEY(cell_id) REFERENCES cell (id),
    CONSTRAINT fk_planned_run_id_run FOREIGN KEY(run_id) REFERENCES run (id)
) WITHOUT ROWID;
CREATE TABLE result (
    id INTEGER NOT NULL, run_id INTEGER NOT NULL, cell_id INTEGER NOT NULL, attempt INTEGER NOT NULL,
    verdict VARCHAR(20) NOT NULL, kind VARCHAR(20), reason TEXT NOT NULL, started DATETIME NOT NULL,
    seconds FLOAT NOT NULL, environment_id INTEGER, pins_id INTEGER, command_id INTEGER,
    passed INTEGER NOT NULL, failed INTEGER NOT NULL, error INTEGER NOT NULL, skipped INTEGER NOT NULL,
    xfailed INTEGER NOT NULL, xpassed INTEGER NOT NULL,
    CONSTRAINT pk_result PRIMARY KEY (id),
    CONSTRAINT fk_result_command_id_shared_text FOREIGN KEY(command_id) REFERENCES shared_text (id),
    CONSTRAINT fk_result_environment_id_shared_text FOREIGN KEY(environment_id) REFERENCES shared_text (id),
    CONSTRAINT fk_result_pins_id_shared_text FOREIGN KEY(pins_id) REFERENCES shared_text (id),
    CONSTRAINT fk_result_run_id_cell_id_planned FOREIGN KEY(run_id, cell_id) REFERENCES planned (run_id, cell_id),
    CONSTRAINT uq_result_run_id_cell_id_attempt UNIQUE (run_id, cell_id, attempt)
);
CREATE INDEX ix_result_cell_id ON result (cell_id);
CREATE TABLE log (
    result_id INTEGER NOT NULL, content BLOB NOT NULL,
    CONSTRAINT pk_log PRIMARY KEY (result_id),
    CONSTRAINT fk_log_result_id_result FOREIGN KEY(result_id) REFERENCES result (id)
);
CREATE TABLE test (
    result_id INTEGER NOT NULL, position INTEGER NOT NULL, nodeid_id INTEGER NOT NULL,
    outcome VARCHAR(8) NOT NULL, seconds FLOAT NOT NULL, message_id INTEGER,
    CONSTRAINT pk_test PRIMARY KEY (result_id, position),
    CONSTRAINT fk_test_message_id_shared_text FOREIGN KEY(message_id) REFERENCES shared_text (id),
    CONSTRAINT fk_test_nodeid_id_nodeid FOREIGN KEY(nodeid_id) REFERENCES nodeid (id),
    CONSTRAINT fk_test_result_id_result FOREIGN KEY(result_id) REFERENCES result (id)
) WITHOUT ROWID;
CREATE INDEX ix_test_failed ON test (result_id, nodeid_id, outcome) WHERE outcome IN ('failed', 'error');
CREATE TABLE token (
    id INTEGER NOT NULL, name VARCHAR(100) NOT NULL, digest VARCHAR(64) NOT NULL, scopes VARCHAR(100) NOT NULL,
    created DATETIME NOT NULL, expires DATETIME, revoked DATETIME, used DATETIME,
    CONSTRAINT pk_token PRIMARY KEY (id),
    CONSTRAINT uq_token_digest UNIQUE (digest),
    CONSTRAINT uq_token_name UNIQUE (name)
);
CREATE TABLE worker (
    id INTEGER NOT NULL, name VARCHAR(100) NOT NULL, token VARCHAR(100) NOT NULL, began DATETIME NOT NULL,
    seen DATETIME NOT NULL, machine TEXT NOT NULL,
    CONSTRAINT pk_worker PRIMARY KEY (id),
    CONSTRAINT uq_worker_name UNIQUE (name)
);
CREATE INDEX ix_worker_seen ON worker (seen);
CREATE TABLE task (
    id INTEGER NOT NULL, run_id INTEGER NOT NULL, cell_id INTEGER NOT NULL, attempt INTEGER NOT NULL,
    suite TEXT NOT NULL, fingerprint VARCHAR(64) NOT NULL, python VARCHAR(40) NOT NULL, gpus INTEGER NOT NULL,
    memory FLOAT NOT NULL, low INTEGER NOT NULL, high INTEGER NOT NULL, labels TEXT NOT NULL,
    rank INTEGER NOT NULL, state VARCHAR(20) NOT NULL, tries INTEGER NOT NULL, lease VARCHAR(64),
    worker VARCHAR(100), until DATETIME,
    CONSTRAINT pk_task PRIMARY KEY (id),
    CONSTRAINT fk_task_cell_id_cell FOREIGN KEY(cell_id) REFERENCES cell (id),
    CONSTRAINT fk_task_run_id_run FOREIGN KEY(run_id) REFERENCES run (id),
    CONSTRAINT uq_task_lease UNIQUE (lease),
    CONSTRAINT uq_task_run_id_cell_id_attempt UNIQUE (run_id, cell_id, attempt)
);
CREATE INDEX ix_task_state ON task (state, rank, id);
CREATE INDEX ix_task_state_until ON task (state, until);
CREATE TABLE lease (
    id VARCHAR(64) NOT NULL, task_id INTEGER NOT NULL, worker VARCHAR(100) NOT NULL,
    token VARCHAR(100) NOT NULL, begun DATETIME NOT NULL, ended DATETIME, how VARCHAR(20),
    CONSTRAINT pk_lease PRIMARY KEY (id),
    CONSTRAINT fk_lease_task_id_task FOREIGN KEY(task_id) REFERENCES task (id)
);
CREATE INDEX ix_lease_task_id ON lease (task_id);
CREATE TABLE late (
    lease VARCHAR(64) NOT NULL, task_id INTEGER NOT NULL, received DATETIME NOT NULL,
    verdict VARCHAR(20) NOT NULL, kind VARCHAR(20), reason TEXT NOT NULL, started DATETIME NOT NULL,
    seconds FLOAT NOT NULL, content BLOB NOT NULL, log BLOB,
    CONSTRAINT pk_late PRIMARY KEY (lease),
    CONSTRAINT fk_late_lease_lease FOREIGN KEY(lease) REFERENCES lease (id),
    CONSTRAINT fk_late_task_id_task FOREIGN KEY(task_id) REFERENCES task (id)
);
CREATE INDEX ix_late_task_id ON late (task_id);
CREATE TABLE upload (
    lease VARCHAR(64) NOT NULL, received DATETIME NOT NULL, content BLOB NOT NULL,
    CONSTRAINT pk_upload PRIMARY KEY (lease),
    CONSTRAINT fk_upload_lease_lease FOREIGN KEY(lease) REFERENCES lease (id)
);
CREATE TABLE document (
    id INTEGER NOT NULL, name VARCHAR(100) NOT NULL, made DATETIME NOT NULL, content BLOB NOT NULL,
    CONSTRAINT pk_document PRIMARY KEY (id)
);
CREATE INDEX ix_document_name ON document (name);
CREATE TABLE release_seen (
    distribution VARCHAR(100) NOT NULL, version VARCHAR(100) NOT NULL, seen DATETIME NOT NULL,
    CONSTRAINT pk_release_seen PRIMARY KEY (distribution, version)
) WITHOUT ROWID;
