//! Writes a script that reproduces the growth without llama-warden. It needs POSIX sh, curl, a plain
//! llama-server, Linux's /proc, and for VRAM nvidia-smi.

use std::path::Path;

use serde_json::Value;
use warden_experiment::crash::WorkloadCrash;
use warden_experiment::{LegFinding, Workload};

use super::folder::ReportFolder;
use super::setup::{ExperimentSetup, arguments, export_lines, file_variables, is_variable_name};
use super::table::leg_name;
use super::{BetweenReport, IsolationReport};
use crate::client::LabAnswer;
use crate::proof::PublishedRequest;
use crate::shell::quote_word;
use crate::workload::{ServerLimits, TextGenerator, WorkloadScript};

const MAX_STEPS: usize = 16;
/// Most steps that lead to a crash; after them the script starts over.
const MAX_CRASH_STEPS: usize = 128;
/// Most bytes of the requests, because the folder is to be sent.
const MAX_REQUEST_BYTES: usize = 16 << 20;
/// Placeholder for the request's number, which makes each text unique.
const NUMBER_MARK: &str = "@N@";
/// Placeholder for the number of the round; requests of a conversation share their beginning within a round.
const ROUND_MARK: &str = "@ROUND@";

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ScriptRequest {
    path: String,
    pub(crate) body: String,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct ScriptRequests {
    pub(crate) bodies: Vec<ScriptRequest>,
    concurrent: usize,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct ScriptEnvironment<'a> {
    /// Variables that the server must not inherit.
    pub(crate) removed: &'a [String],
    pub(crate) directory: &'a Path,
}

/// Returns the requests of a workload. Where requests depend on answers, those answers are generated. For a
/// `crash`, all requests that led to it are returned in their order.
pub(crate) fn workload_requests(
    workload: Workload,
    folder: &ReportFolder<'_>,
    crash: Option<&WorkloadCrash>,
) -> ScriptRequests {
    let ReportFolder { numbers, slots, n_ctx, tokens_per_word, .. } = *folder;
    let Ok(mut script) =
        WorkloadScript::new(workload, numbers, ServerLimits { slots, n_ctx, tokens_per_word })
    else {
        return ScriptRequests::default();
    };
    let mut all = ScriptRequests::default();
    let led = crash.map(|crash| usize::try_from(crash.at_request).unwrap_or(usize::MAX).min(MAX_CRASH_STEPS));
    let mut left = MAX_REQUEST_BYTES;
    for step in 0..=led.unwrap_or(MAX_STEPS) {
        let asks = script.next();
        // A conversation includes earlier answers; use generated ones of the same length.
        let text = TextGenerator::new(tokens_per_word)
            .text(u64::MAX - u64::try_from(step).unwrap_or(0), numbers.answer);
        script.take_answers(&vec![Some(LabAnswer { text, ..LabAnswer::default() }); asks.len()]);
        all.concurrent = all.concurrent.max(asks.len());
        // The first request is a warm-up, but a conversation needs its beginning.
        if step == 0 && led.is_none() && workload != Workload::Conversation {
            continue;
        }
        for ask in asks {
            let Some(mut body) = ask.body else { continue };
            insert_marks(&mut body, workload == Workload::Conversation);
            let request = ScriptRequest { path: ask.path, body: body.to_string() };
            if led.is_some() {
                let Some(rest) = left.checked_sub(request.body.len()) else { return all };
                left = rest;
                all.bodies.push(request);
            } else if !all.bodies.contains(&request) {
                all.bodies.push(request);
            }
        }
    }
    if led.is_none() {
        all.bodies.truncate(MAX_STEPS * all.concurrent.max(1));
    }
    all
}

impl From<&[PublishedRequest]> for ScriptRequests {
    fn from(all: &[PublishedRequest]) -> Self {
        let body =
            |one: &PublishedRequest| ScriptRequest { path: one.path.clone(), body: one.body.to_string() };
        Self { bodies: all.iter().map(body).collect(), concurrent: 1 }
    }
}

/// Inserts the request's placeholder before its last text; in a conversation, the round's before the first
/// text.
fn insert_marks(body: &mut Value, is_conversation: bool) {
    if let Some(Value::String(text)) = body.get_mut("prompt") {
        text.insert_str(0, &format!("{NUMBER_MARK} "));
        return;
    }
    let messages = body.get_mut("messages").and_then(Value::as_array_mut);
    let message = messages.and_then(|all| if is_conversation { all.first_mut() } else { all.last_mut() });
    let Some(message) = message else { return };
    let text = match message.get_mut("content") {
        Some(Value::String(text)) => Some(text),
        Some(Value::Array(parts)) => parts.iter_mut().find_map(|part| match part.get_mut("text") {
            Some(Value::String(text)) => Some(text),
            _ => None,
        }),
        _ => None,
    };
    if let Some(text) = text {
        text.insert_str(0, &format!("{} ", if is_conversation { ROUND_MARK } else { NUMBER_MARK }));
    }
}

pub(crate) fn growth_script(
    about: &ExperimentSetup,
    finding: &LegFinding,
    requests: &ScriptRequests,
    setting: &ScriptEnvironment<'_>,
) -> String {
    let shown = finding.series.iter().filter_map(|found| {
        let rate = found.per_request?.value / 1024.0;
        Some(format!("#   {}: {}, {rate:+.0} KiB a request\n", found.series, found.verdict.as_str()))
    });
    let grows = finding.series.iter().any(|found| found.verdict.grows());
    let what = if finding.crash.is_some() {
        "Shows how llama-server crashes"
    } else if grows {
        "Shows how the memory of llama-server grows"
    } else {
        "Shows the memory of llama-server"
    };
    let died = finding.crash.iter().map(|crash| {
        let why = crash.why.replace('\n', " ");
        // A crash that comes a little later counts as the same one.
        format!("#   it ended by itself at request {}: {why}\n", crash.at_request)
    });
    let most = finding.crash.as_ref().map_or(finding.requests, |crash| crash.at_request.saturating_mul(2));
    let under = about.under.iter().map(|tool| {
        format!("# The server ran under `{}`, which this script leaves out.\n", tool.replace('\n', " "))
    });
    // llama-server uses the last occurrence of a flag.
    let more = if finding.control { " --cache-ram 0" } else { "" };
    let text = SCRIPT_TEMPLATE
        .replace("@WHAT@", what)
        .replace("@WORKLOAD@", &leg_name(finding))
        .replace("@REQUESTS@", &most.max(1).to_string());
    let shown: String = shown.chain(died).chain(under).collect();
    fill_template(&text, about, more, requests, setting).replacen(RESULT_MARK, &shown, 1)
}

pub(crate) fn request_script(
    about: &ExperimentSetup,
    between: Option<&BetweenReport>,
    requests: &ScriptRequests,
    setting: &ScriptEnvironment<'_>,
) -> String {
    let told = between.iter().flat_map(|between| between.sentences());
    let told = told.map(|line| format!("#   {}\n", line.replace('\n', " ")));
    let head = SCRIPT_TEMPLATE.split(MEMORY_SECTION).next().unwrap_or_default();
    let text = format!("{head}{VISIT_TEMPLATE}")
        .replace("@WHAT@ under the workload @WORKLOAD@", "Shows what llama-server answers, and how fast")
        .replace("[REQUESTS]", "[TIMES]")
        .replace("requests=${1:-@REQUESTS@}", "times=${1:-3}")
        .replace("# So many are sent at a time.\ntogether=@TOGETHER@\n", "");
    fill_template(&text, about, "", requests, setting).replacen(RESULT_MARK, &told.collect::<String>(), 1)
}

pub(crate) fn isolation_script(
    about: &ExperimentSetup,
    isolation: &IsolationReport,
    requests: &ScriptRequests,
    setting: &ScriptEnvironment<'_>,
) -> String {
    let mut shown = String::new();
    shown.extend(isolation.sentences().iter().map(|line| format!("#   {}\n", line.replace('\n', " "))));
    let names = isolation.requests.iter().enumerate().map(|(at, place)| {
        format!("    {at}) called=\"conversation {}, turn {}\" ;;\n", place.conversation + 1, place.turn + 1)
    });
    let line = |batch: &Vec<usize>| batch.iter().map(usize::to_string).collect::<Vec<_>>().join(" ") + "\n";
    let truth = isolation.truth_args.iter().map(|word| quote_word(word)).collect::<Vec<_>>().join(" ");
    let text = ISOLATION_TEMPLATE
        .replace("@LIMIT@", &format!("{:.4}", isolation.finding.scales.limit))
        .replace("@NAMES@", &names.collect::<String>())
        .replace("@TRUTH@", &truth)
        .replace("@ORDER@", &isolation.order.iter().map(line).collect::<String>());
    fill_template(&text, about, "", requests, setting).replacen(RESULT_MARK, &shown, 1)
}

/// Placeholder for the results. It is filled in last, because results quote logs and commit subjects, which
/// may contain placeholders themselves.
const RESULT_MARK: &str = "@SHOWN@";

const MEMORY_SECTION: &str = "# Anonymous memory of the process";

fn fill_template(
    text: &str,
    about: &ExperimentSetup,
    more: &str,
    requests: &ScriptRequests,
    setting: &ScriptEnvironment<'_>,
) -> String {
    let unset =
        setting.removed.iter().filter(|name| is_variable_name(name)).map(|name| format!("unset {name}\n"));
    let paths = requests.bodies.iter().enumerate();
    let paths = paths.map(|(at, request)| format!("    {at}) path={} ;;\n", quote_word(&request.path)));
    let args = arguments(about, setting.directory) + more;
    let binary = Path::new(&about.binary);
    let has_folder = binary.components().count() > 1;
    let binary = if has_folder { setting.directory.join(binary) } else { binary.to_owned() };
    text.replace("@TOGETHER@", &requests.concurrent.max(1).to_string())
        .replace("@BINARY@", &quote_word(&binary.to_string_lossy()))
        .replace("@FILES@", &file_variables(about, setting.directory))
        .replace("@EXPORTS@", &export_lines(about, setting.directory))
        .replace("@UNSET@", &unset.collect::<String>())
        .replace("@ARGS@", &args)
        .replace("@BODIES@", &requests.bodies.len().to_string())
        .replace("@PATHS@", &paths.collect::<String>())
}

const SCRIPT_TEMPLATE: &str = include_str!("reproduce.sh");
const VISIT_TEMPLATE: &str = include_str!("visit.sh");
const ISOLATION_TEMPLATE: &str = include_str!("isolation.sh");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_gets_the_number_of_its_request() {
        let mut chat = serde_json::json!({"messages": [{"role": "user", "content": "hi"}]});
        insert_marks(&mut chat, false);
        assert_eq!(chat["messages"][0]["content"], "@N@ hi");
        let image = serde_json::json!({"type": "image_url", "image_url": {"url": "data:,"}});
        let mut parts =
            serde_json::json!({"messages": [{"content": [image, {"type": "text", "text": "what"}]}]});
        insert_marks(&mut parts, false);
        assert_eq!(parts["messages"][0]["content"][1]["text"], "@N@ what");
        let mut prompt = serde_json::json!({"prompt": "x"});
        insert_marks(&mut prompt, false);
        assert_eq!(prompt["prompt"], "@N@ x");
        let mut input = serde_json::json!({"input": "x"});
        insert_marks(&mut input, false);
        assert_eq!(input, serde_json::json!({"input": "x"}));
    }

    #[test]
    fn a_conversation_takes_turns_and_is_sent_on_all_slots_at_once() {
        let numbers = &warden_policies::defaults().diagnose;
        let folder = ReportFolder {
            numbers,
            removed: &[],
            directory: Path::new("/"),
            slots: 3,
            n_ctx: None,
            tokens_per_word: 0.0,
            visit: &[],
        };
        let all = workload_requests(Workload::Conversation, &folder, None);
        assert_eq!(all.concurrent, 3);
        assert!(all.bodies.len() > 6 && all.bodies.len().is_multiple_of(3), "{}", all.bodies.len());
        for request in &all.bodies {
            let body: Value = serde_json::from_str(&request.body).unwrap();
            let roles: Vec<_> =
                body["messages"].as_array().unwrap().iter().map(|one| one["role"].clone()).collect();
            let turns = ["user", "assistant"].iter().cycle().take(roles.len());
            assert!(roles.iter().eq(turns) && roles.len() % 2 == 1, "{roles:?}");
        }
    }

    #[test]
    fn a_marker_in_the_subject_of_a_commit_is_a_part_of_the_subject() {
        use crate::report::RevisionLabel;
        use warden_experiment::between::{RevisionAim, RevisionConclusion, RevisionOutcome};

        let subject = "server : @PATHS@ @SHOWN@ @ARGS@ [REQUESTS]";
        let revision = RevisionLabel {
            commit: "a".repeat(40),
            label: "b1".to_owned(),
            date: String::new(),
            subject: subject.to_owned(),
        };
        let conclusion = RevisionConclusion {
            outcome: RevisionOutcome::Found { revision: 1 },
            aim: RevisionAim::Answers,
            symptom: None,
            ill_is_newer: Some(true),
            bounds: None,
            judged: Vec::new(),
            newer: Vec::new(),
            older: Vec::new(),
            ratios: Vec::new(),
            differences: Vec::new(),
            legs: 0,
        };
        let between = BetweenReport { repository: String::new(), line: vec![revision; 2], conclusion };
        let sent = [PublishedRequest { path: "/completion".to_owned(), body: Value::Null }];
        let setting = ScriptEnvironment { removed: &[], directory: Path::new("/") };
        let text = request_script(
            &ExperimentSetup::default(),
            Some(&between),
            &ScriptRequests::from(&sent[..]),
            &setting,
        );
        assert!(text.contains(&format!("{subject}\n")), "{text}");
        assert_eq!(text.matches("0) path=").count(), 1, "{text}");
    }
}
