//! A folder for whoever is to act on a leak: what was run on what, what was found, whether a switch stops it, and a script
//! that shows it with plain llama-server and curl.
//!
//! | file | what it is |
//! |---|---|
//! | `report.md` | for people |
//! | `findings.json` | everything, for programs |
//! | `report.html` | the same with plots |
//! | `reproduce.sh`, `requests/` | the script, and what it sends |

use std::fmt::Write as _;
use std::io;
use std::path::Path;

use warden_policies::defaults::Diagnose;
use warden_policies::experiment::Finding;
use warden_policies::growth::Verdict;

use super::reproduce::{requests, script};
use super::{LegReport, Report, notes, rows};

impl Report {
    /// Writes the folder, which is made if it is not there. `system`: the machine, a line each, `name: value`; `removed`:
    /// variables that the server must not inherit; `slots` and `n_ctx`: of the server.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write_folder(
        &self,
        folder: &Path,
        numbers: &Diagnose,
        system: &[(String, String)],
        removed: &[String],
        slots: u32,
        n_ctx: Option<u64>,
    ) -> io::Result<()> {
        std::fs::create_dir_all(folder)?;
        let worst = self.worst();
        let mut reproduces = false;
        if let Some(leg) = worst {
            let all = requests(leg.finding.workload, numbers, slots, n_ctx);
            if !all.is_empty() {
                let inner = folder.join("requests");
                std::fs::create_dir_all(&inner)?;
                for (at, request) in all.iter().enumerate() {
                    std::fs::write(inner.join(format!("{at}.json")), &request.body)?;
                }
                let text = script(&self.about, &leg.finding, &all, removed);
                std::fs::write(folder.join("reproduce.sh"), text)?;
                reproduces = true;
            }
        }
        std::fs::write(folder.join("report.md"), self.markdown(system, reproduces))?;
        std::fs::write(folder.join("report.html"), self.html())?;
        let mut json = serde_json::to_string_pretty(self).map_err(io::Error::other)?;
        json.push('\n');
        std::fs::write(folder.join("findings.json"), json)
    }

    /// The leg to show to others: the one that leaks most, else the one that grows most.
    fn worst(&self) -> Option<&LegReport> {
        let key = |leg: &&LegReport| {
            let of = |found: &warden_policies::experiment::SeriesFinding| {
                (found.verdict, found.per_request.map_or(0.0, |slope| slope.value))
            };
            let all = leg.finding.series.iter().map(of);
            all.max_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))).unwrap_or((Verdict::Warming, 0.0))
        };
        self.legs.iter().max_by(|a, b| {
            let (one, other) = (key(a), key(b));
            one.0.cmp(&other.0).then(one.1.total_cmp(&other.1))
        })
    }

    /// For people: what a maintainer needs to act.
    pub fn markdown(&self, system: &[(String, String)], reproduces: bool) -> String {
        let mut text = String::new();
        let findings: Vec<&Finding> = self.legs.iter().map(|leg| &leg.finding).collect();
        let head = if self.leaks { "Memory of llama-server grows" } else { "Memory of llama-server" };
        // Writing to a String cannot fail.
        let _ = writeln!(text, "# {head}\n");
        for sentence in headline(&findings) {
            let _ = writeln!(text, "- {sentence}");
        }
        let _ = writeln!(text, "\n## Versions\n\n| what | which |\n|---|---|");
        let mut facts = vec![
            ("llama-server".to_owned(), self.about.server.clone()),
            ("llama-warden".to_owned(), self.about.warden.clone()),
            ("when".to_owned(), self.about.began.clone()),
        ];
        facts.extend(system.iter().cloned());
        facts
            .extend(self.devices.iter().map(|device| (format!("GPU {}", device.gpu.0), device.name.clone())));
        for (name, value) in facts.iter().filter(|(_, value)| !value.is_empty()) {
            let _ = writeln!(text, "| {name} | {} |", cell(value));
        }
        let _ = writeln!(text, "\n```\n{}\n```\n", self.about.command_line());
        let _ = writeln!(text, "## What was measured\n");
        text.push_str(&table(&rows(&findings, &self.skipped)));
        let _ = writeln!(
            text,
            "\nEach workload ran in a fresh process. Host memory is RssAnon + VmSwap of its process group, read after each \
             request when nothing was in flight; VRAM is what the driver charges it with. Growth is Sen's slope over the \
             last two thirds of a run, with a 95 % interval:\n"
        );
        for finding in &findings {
            for found in &finding.series {
                let Some(slope) = found.per_request else { continue };
                let _ = writeln!(
                    text,
                    "- {} {}: {}, {:.3} MiB a request ({:.3} to {:.3}) over {} requests, from {:.0} to {:.0} MiB",
                    finding.workload,
                    found.series,
                    found.verdict.as_str(),
                    slope.value / MIB,
                    slope.low / MIB,
                    slope.high.min(1e15) / MIB,
                    finding.requests,
                    mib(found.first),
                    mib(found.last)
                );
            }
        }
        for note in notes(&findings) {
            let _ = writeln!(text, "- {note}");
        }
        if let Some(cure) = &self.cure {
            let _ = writeln!(text, "\n## With and without\n");
            for sentence in cure.sentences() {
                let _ = writeln!(text, "- {sentence}");
            }
            let rows = cure.rows();
            if rows.len() > 1 {
                let _ = writeln!(text, "\n{}", table(&rows));
            }
            for switch in &cure.switches {
                let _ = writeln!(text, "- `{}`: {} ({})", switch.item, switch.title, switch.does);
            }
        }
        if let Some(headroom) = &self.headroom {
            let _ = writeln!(text, "\n## The largest prompts\n\n{}", table(&headroom.rows()));
            for sentence in headroom.sentences() {
                let _ = writeln!(text, "- {sentence}");
            }
        }
        if reproduces {
            let _ = writeln!(
                text,
                "\n## Reproduce\n\n```\nLLAMA_SERVER=/path/to/llama-server sh reproduce.sh\n```\n\nIt starts \
                 llama-server with the arguments above, sends the requests in `requests/` by curl, and prints the memory \
                 of the process as it goes. It needs a Linux /proc; VRAM is shown where there is nvidia-smi."
            );
        }
        text
    }
}

const MIB: f64 = 1_048_576.0;

#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / MIB
}

/// What leaks, in a line each.
fn headline(findings: &[&Finding]) -> Vec<String> {
    let mut lines = Vec::new();
    for finding in findings {
        for found in finding.series.iter().filter(|found| found.verdict >= Verdict::Suspected) {
            let rate = found.per_request.map_or(0.0, |slope| slope.value) / MIB;
            lines.push(format!(
                "{} under {}: {rate:+.2} MiB a request, without a sign of an end",
                found.series, finding.workload
            ));
        }
    }
    if lines.is_empty() {
        lines.push("nothing leaks under the workloads below".to_owned());
    }
    lines
}

/// A table as Markdown writes it; the first row is the head.
fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let mut text = String::new();
    for (at, row) in rows.iter().enumerate() {
        let cells = (0..columns).map(|column| row.get(column).map_or(String::new(), |text| cell(text)));
        let _ = writeln!(text, "| {} |", cells.collect::<Vec<_>>().join(" | "));
        if at == 0 {
            let _ = writeln!(text, "|{}", "---|".repeat(columns));
        }
    }
    text
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}
