//! Checks a model that another program than llama-server serves (`command`).

use warden_policies::{ServerFacts, StreamHeadTime};
use warden_supervisor::spec::{PORT_PLACEHOLDER, SOCKET_PLACEHOLDER};

use super::model::ModelResolver;
use crate::problem::dotted_key;

/// Facts that are assumed of an unknown server. With one HTTP thread, no idle connection is kept: it would
/// occupy the only thread of a simple server.
pub(super) const OTHER_PROGRAM_FACTS: ServerFacts = ServerFacts {
    stream_head: StreamHeadTime::Unknown,
    unix_sockets: None,
    http_threads: Some(1),
    slot_files: None,
    discards_bodies: None,
};

impl ModelResolver<'_, '_> {
    /// Reports keys that do not fit `command`, and a command that does not say where its program listens.
    pub(super) fn check_command(&mut self) {
        let model = self.model;
        if !model.runs_other_program() {
            if self.config.loaded.own_table(self.name).is_some_and(|own| own.entry("command").is_some()) {
                let hint = "begin it with a program, or leave it out";
                self.report(&["command"], "`command` is empty", hint);
            } else if model.ready.is_some() {
                let hint = "leave it out: a llama-server is ready when `/health` says so";
                self.report(&["ready"], "`ready` needs `command`", hint);
            }
            return;
        }
        for path in self.config.loaded.refused_keys(self.name) {
            let key = dotted_key(&path);
            let hint = match key.as_str() {
                "model" | "args" | "fallback" => "write the program's own arguments into `command`",
                "binary" | "build" => "the first word of `command` is the program",
                _ => "leave it out",
            };
            let keys: Vec<&str> = path.iter().map(String::as_str).collect();
            self.report(
                &keys,
                &format!("`{key}` is for llama-server, and `command` starts another program"),
                hint,
            );
        }
        if model.command.first().is_some_and(String::is_empty) {
            self.report(&["command"], "`command` begins with an empty word", "begin it with a program");
        }
        let words = || model.command.iter().skip(1).chain(model.env.values());
        let uses = |placeholder: &str| words().any(|word| word.contains(placeholder));
        match (uses(PORT_PLACEHOLDER), uses(SOCKET_PLACEHOLDER)) {
            (false, false) => {
                let hint = "write `${PORT}` where it takes its port: `\"--port\", \"${PORT}\"`; `${SOCKET}` is the \
                            path of a Unix socket";
                let what = "neither `command` nor `env` says where the program listens";
                self.report(&["command"], what, hint);
            }
            (true, true) => {
                let what = "`${PORT}` and `${SOCKET}` are two addresses, and a program gets one";
                self.report(&["command"], what, "keep one of them");
            }
            _ => {}
        }
        let is_path = |path: &str| path.starts_with('/') && path.chars().all(|c| c.is_ascii_graphic());
        if model.ready.as_deref().is_some_and(|path| !is_path(path)) {
            self.report(&["ready"], "`ready` is no path", "begin it with `/`, like `/v1/models`");
        }
    }
}
