//! Progress lines on standard error, and the events of a build as such lines.

use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::Instant;
use warden_builder::{BuildEvent, BuildPhase};

use crate::out;

/// Without a terminal, more frequent lines would dominate a build log.
const PLAIN_LINE_INTERVAL: Duration = Duration::from_secs(10);
const MAX_LINE_COLUMNS: usize = 79;

/// Ends when the sender of the events is dropped.
pub(crate) async fn show_events(mut events: UnboundedReceiver<BuildEvent>) {
    let mut lines = ProgressLines::new();
    let mut phase = BuildPhase::Fetch;
    while let Some(event) = events.recv().await {
        match event {
            BuildEvent::Progress { done, total, item } => {
                lines.change(&format!("{phase} {done}/{total} {item}"), done == total);
            }
            BuildEvent::Phase(next) => {
                phase = next;
                lines.line(&phase.to_string());
            }
            other => event_text(&other).iter().for_each(|text| lines.more(text)),
        }
    }
    lines.close();
}

#[derive(Debug)]
pub(crate) struct ProgressLines {
    terminal: bool,
    started: Instant,
    told: Option<Instant>,
    open: bool,
}

impl ProgressLines {
    pub(crate) fn new() -> Self {
        Self { terminal: out::stderr_is_terminal(), started: Instant::now(), told: None, open: false }
    }

    /// Prints the first line about a new subject; the next change is printed even without a terminal.
    pub(crate) fn line(&mut self, text: &str) {
        self.told = None;
        self.more(text);
    }

    pub(crate) fn more(&mut self, text: &str) {
        self.close();
        for line in text.lines() {
            out::error_line(&format!("{}  {line}", self.elapsed()));
        }
    }

    /// Replaces the changing line. Without a terminal, prints at most a line per interval, and the `last`
    /// one.
    pub(crate) fn change(&mut self, text: &str, last: bool) {
        let text = format!("{}  {text}", self.elapsed());
        if self.terminal {
            let cut: String = text.chars().take(MAX_LINE_COLUMNS).collect();
            out::error_text(&format!("\r\x1b[K{}", out::terminal_safe(&cut)));
            self.open = true;
        } else if self.told.is_none_or(|told| told.elapsed() >= PLAIN_LINE_INTERVAL) || last {
            self.told = Some(Instant::now());
            out::error_line(&text);
        }
    }

    pub(crate) fn close(&mut self) {
        if std::mem::take(&mut self.open) {
            out::error_text("\n");
        }
    }

    fn elapsed(&self) -> String {
        let seconds = self.started.elapsed().as_secs();
        format!("{:02}:{:02}", seconds / 60, seconds % 60)
    }
}

fn event_text(event: &BuildEvent) -> Option<String> {
    Some(match event {
        BuildEvent::Obtaining { what, from, into } => {
            format!("obtaining {what} from {from} into {}", into.display())
        }
        BuildEvent::Planned(plan) => {
            let backend = format!("{} ({})", plan.recipe.backend, plan.recipe.arch());
            let patches = &plan.recipe.patch_set;
            format!("found {}\nbuild {}\nfor {backend}, patches {patches}", plan.source, plan.id)
        }
        BuildEvent::Hit(id) => format!("build {id} is in the store already"),
        BuildEvent::Waiting(id) => format!("another llama-warden builds {id}; waiting for it"),
        BuildEvent::Note(note) => note.clone(),
        BuildEvent::Log(path) => format!("full log: {}", path.display()),
        BuildEvent::Checked(check) => format!("checked: {check}"),
        BuildEvent::Installed(id) => format!("build {id} is in the store"),
        BuildEvent::Phase(_) | BuildEvent::Progress { .. } => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_build_tells_while_it_runs_is_a_page() {
        let plan = serde_json::from_value(serde_json::json!({
            "id": "90b61a0bd726c6ae",
            "recipe": {
                "schema": 1, "source": "archive-sha256:00", "root": "", "patch_set": "cuda-memory@1", "backend": "cuda",
                "arch": "native", "cmake": [], "c": "cc", "cxx": "c++", "target": "x86_64-linux-gnu", "cpu": "", "gpu": ["90"],
            },
            "source": {
                "given": "/x.tar.gz", "kind": "archive", "identity": "archive-sha256:00", "root": "",
                "server": "tools/server", "revision": {"commit": "0c1e570980000000", "build_number": 8827},
            },
            "compilers": {
                "c": {"path": "/usr/bin/cc", "version": "cc 12.2.0"}, "cxx": {"path": "/usr/bin/c++", "version": "c++ 12.2.0"},
                "target": "x86_64-linux-gnu", "cpu": "",
            },
        }));
        let id = || "90b61a0bd726c6ae".parse::<warden_builder::BuildId>().unwrap();
        let events = [
            BuildEvent::Obtaining {
                what: "cmake and ninja".to_owned(),
                from: "PyPI",
                into: "/data/tools".into(),
            },
            BuildEvent::Planned(plan.unwrap()),
            BuildEvent::Hit(id()),
            BuildEvent::Waiting(id()),
            BuildEvent::Note("4 jobs: as many as cores".to_owned()),
            BuildEvent::Log("/cache/logs/build.log".into()),
            BuildEvent::Checked("health"),
            BuildEvent::Installed(id()),
        ];
        let told = events.iter().filter_map(event_text).map(|told| told + "\n");
        let phases = [
            BuildPhase::Fetch,
            BuildPhase::Check,
            BuildPhase::Unpack,
            BuildPhase::Page,
            BuildPhase::Configure,
            BuildPhase::Compile,
            BuildPhase::Verify,
            BuildPhase::Install,
        ];
        let phases = phases.map(|phase| format!("{phase}\n"));
        insta::assert_snapshot!(told.chain(phases).collect::<String>());
    }
}
