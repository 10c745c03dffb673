//! Renders the report as Markdown, for maintainers.

use std::fmt::Write as _;

use warden_experiment::LegFinding;
use warden_policies::phrases;
use warden_policies::units::as_f64;

use super::folder::ScriptSubject;
use super::summary::{OverallResult, headline};
use super::table::{MIB, leg_name, table_rows};
use super::{
    BetweenReport, CureReport, DiagnoseReport, IsolationReport, LegReport, SurvivalReport, UntriedSwitch,
};

impl DiagnoseReport {
    /// `shows` is the subject of the script next to the report. Writing to a `String` cannot fail.
    pub(super) fn to_markdown(&self, shows: ScriptSubject<'_>) -> String {
        let mut text = String::new();
        let head = match OverallResult::from_report(self) {
            OverallResult::Crashes => "A crash of llama-server",
            OverallResult::Leaks => "Memory of llama-server grows",
            OverallResult::Suspected => "Memory of llama-server may grow",
            OverallResult::Slower => "Speed of llama-server between two revisions",
            OverallResult::Otherwise => "Answers of llama-server between two revisions",
            OverallResult::NoGrowth => "Memory of llama-server",
        };
        let head = self.isolation.as_ref().map_or(head, IsolationReport::title);
        let tool = if self.about.under.is_some() { " and of the tool around it" } else { "" };
        let _ = writeln!(text, "# {}\n", head.replacen("llama-server", &format!("llama-server{tool}"), 1));
        write_list(
            &mut text,
            &self.isolation.as_ref().map_or_else(|| headline(self), IsolationReport::sentences),
        );
        self.write_versions(&mut text);
        self.write_measurements(&mut text);
        if let Some(cure) = &self.cure {
            write_comparison(&mut text, cure);
        }
        for one in &self.survival {
            write_survival(&mut text, one);
        }
        if let Some(between) = &self.between {
            write_revisions(&mut text, between);
        }
        if let Some(rows) = self.isolation.as_ref().map(IsolationReport::rows).filter(|rows| rows.len() > 1) {
            let _ = writeln!(text, "\n## Which answers\n\n{}", markdown_table(&rows));
        }
        if !self.attribution.is_empty() {
            let lines = self.attribution.join("\n");
            let _ = writeln!(text, "\n## Which call sites\n\n```\n{lines}\n```");
        }
        write_reproduction(&mut text, shows);
        // A later report recognizes by this line that it may replace the file.
        let _ = writeln!(text, "\nWritten by `llama-warden diagnose`.");
        text
    }

    fn write_versions(&self, text: &mut String) {
        let about = &self.about;
        let _ = writeln!(text, "\n## Versions\n\n| what | which |\n|---|---|");
        let devices =
            self.devices.iter().map(|device| (format!("GPU {}", device.gpu.0), device.name.clone()));
        let own = [
            ("llama-server", &about.server),
            ("llama-warden", &about.warden),
            ("when", &about.began),
            ("model", &about.model),
        ];
        let own = own.into_iter().map(|(name, value)| (name.to_owned(), value.clone()));
        let under = about.under.iter().map(|tool| ("run under".to_owned(), tool.clone()));
        for (name, value) in own.chain(under).chain(about.system.iter().cloned()).chain(devices) {
            if !value.is_empty() {
                let _ = writeln!(text, "| {name} | {} |", escape_cell(&value));
            }
        }
        let _ = writeln!(text, "\n```\n{}\n```", about.command_line());
    }

    fn write_measurements(&self, text: &mut String) {
        let findings: Vec<&LegFinding> = self.legs.iter().map(|leg| &leg.finding).collect();
        if findings.is_empty() && self.skipped.is_empty() {
            return;
        }
        let _ = writeln!(
            text,
            "\n## What was measured\n\n{}",
            markdown_table(&table_rows(&findings, &self.skipped))
        );
        if !findings.is_empty() {
            let _ = writeln!(
                text,
                "Each workload ran in a fresh process. Host memory is RssAnon + VmSwap of its process \
                 group, read after each \
                 request when nothing was in flight; VRAM is what the driver charges it with. Growth is \
                 Sen's slope over the \
                 last two thirds of a run, with a 95 % interval:\n"
            );
        }
        for finding in &findings {
            for found in &finding.series {
                let Some(slope) = &found.per_request else { continue };
                let _ = writeln!(
                    text,
                    "- {} {}: {}, {} over {} requests, from {:.0} to {:.0} MiB",
                    leg_name(finding),
                    found.series,
                    if found.is_too_short() { "too few readings" } else { found.verdict.as_str() },
                    phrases::slope_phrase(slope),
                    finding.requests,
                    as_f64(found.first) / MIB,
                    as_f64(found.last) / MIB
                );
            }
        }
        write_list(text, &self.notes());
        // A leg without the prompt cache does not list that cache, and a leg that failed early may list none.
        let tells = |leg: &&LegReport| !leg.finding.control && !leg.may_keep.is_empty();
        let keeps = self.legs.iter().find(tells).map(|leg| leg.may_keep.as_slice()).unwrap_or_default();
        write_list(
            text,
            &keeps.iter().map(|what| format!("what the server keeps on purpose: {what}")).collect::<Vec<_>>(),
        );
    }
}

fn write_reproduction(text: &mut String, shows: ScriptSubject<'_>) {
    if matches!(shows, ScriptSubject::Nothing) {
        return;
    }
    let _ = writeln!(
        text,
        "\n## Reproduce\n\n```\nLLAMA_SERVER=/path/to/llama-server MODEL=/path/to/model.gguf sh reproduce.sh\n```\n"
    );
    let _ = match shows {
        ScriptSubject::Leg(leg) => writeln!(
            text,
            "It starts llama-server with the arguments above{}, sends the requests of `{}` in `requests/` \
             by curl, and prints \
             the memory of the process as it goes. Without the variables it takes the files of the machine that it was \
             seen on. It needs a Linux /proc; VRAM is shown where there is nvidia-smi.",
            if leg.finding.control { " and `--cache-ram 0`" } else { "" },
            leg.finding.workload
        ),
        ScriptSubject::Conversations => writeln!(
            text,
            "It starts llama-server with one slot and asks for the right answers, then starts llama-server with the \
             arguments above, sends the requests in `requests/` of all conversations by curl, and prints the answers \
             that are not the right ones. Without the variables it takes the files of the machine that it was seen on."
        ),
        _ => writeln!(
            text,
            "It starts llama-server with the arguments above, sends the requests in `requests/` by curl, \
             and prints what is \
             answered and how fast: run it with the builds of both revisions. Without the variables it \
             takes the files of the machine \
             that it was seen on."
        ),
    };
}

fn write_comparison(text: &mut String, cure: &CureReport) {
    let _ = writeln!(text, "\n## With and without\n");
    write_list(text, &cure.sentences());
    let rows = cure.rows();
    if rows.len() > 1 {
        let _ = writeln!(text, "\n{}", markdown_table(&rows));
    }
    write_list(text, &cure.explanations());
    write_untried(text, &cure.left_out());
}

fn write_survival(text: &mut String, one: &SurvivalReport) {
    let _ = writeln!(text, "\n## What stops the crash under {}\n", one.workload);
    write_list(text, &one.sentences());
    let _ = writeln!(text, "\n{}", markdown_table(&one.rows()));
    write_list(text, &one.explanations());
    write_untried(text, &one.left_out());
}

fn write_untried(text: &mut String, all: &[UntriedSwitch]) {
    if !all.is_empty() {
        let _ = writeln!(text, "\n### Not tried\n");
        write_list(text, &all.iter().map(|one| format!("`{}`: {}", one.item, one.why)).collect::<Vec<_>>());
    }
}

fn write_revisions(text: &mut String, between: &BetweenReport) {
    let _ = writeln!(text, "\n## Which revision\n\n- Of {}", between.repository);
    write_list(text, &between.sentences());
    let _ = writeln!(text, "\n{}", markdown_table(&between.rows()));
    let said = between.answer_rows();
    if said.len() > 1 {
        let _ = writeln!(text, "### What the ends answer\n\n{}", markdown_table(&said));
    }
}

fn write_list(text: &mut String, lines: &[String]) {
    for line in lines {
        let _ = writeln!(text, "- {}", line.replace('\n', " "));
    }
}

/// The first row is the head.
fn markdown_table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let mut text = String::new();
    for (at, row) in rows.iter().enumerate() {
        let cells =
            (0..columns).map(|column| row.get(column).map_or(String::new(), |text| escape_cell(text)));
        let _ = writeln!(text, "| {} |", cells.collect::<Vec<_>>().join(" | "));
        if at == 0 {
            let _ = writeln!(text, "|{}", "---|".repeat(columns));
        }
    }
    text
}

fn escape_cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}
