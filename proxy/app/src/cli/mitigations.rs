//! `llama-warden mitigations list|show`: the mitigations against growing memory, and the leaks that they
//! address.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Value, json};
use warden_config::resolve::mitigations::catalogue;
use warden_config::resolve::{own_sets, store};
use warden_patches::mitigation::{
    self, BuildFacts, KnownLeak, LeakMemory, MitigationCatalogue, MitigationEntry,
};
use warden_patches::set::FixEvidence;

use super::shared::ConfigArgs;
use crate::exit::CommandError;
use crate::out;

#[derive(Debug, Subcommand)]
pub(crate) enum MitigationsCommand {
    /// Lists mitigations and the leaks that they address.
    List {
        /// Shows only entries for this backend, such as `cuda`.
        #[arg(long, value_name = "BACKEND")]
        backend: Option<String>,
        /// Shows only entries for this kind of memory.
        #[arg(long, value_name = "MEMORY")]
        memory: Option<MemoryArg>,
        /// Prints JSON, for programs.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        which: TargetBuildArgs,
    },
    /// Shows all that is known about one mitigation or leak.
    Show {
        /// The id of the mitigation or leak.
        id: String,
        /// Prints JSON, for programs.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        which: TargetBuildArgs,
    },
}

/// The build for which the list is shown.
#[derive(Debug, Default, Args)]
pub(crate) struct TargetBuildArgs {
    /// llama-server in use: a build of the store by its id or the beginning of it, or a version of
    /// llama.cpp, such as b8840.
    ///
    /// Default: the newest build of the store, if there is one. The build determines which of your own
    /// fixes are known, and the state of each mitigation: needed, superseded or harmful.
    #[arg(long, value_name = "BUILD")]
    build: Option<String>,
    #[command(flatten)]
    config: ConfigArgs,
}

struct MitigationsForBuild {
    list: MitigationCatalogue,
    build: Option<NamedBuild>,
}

impl TargetBuildArgs {
    fn find(&self) -> Result<MitigationsForBuild, CommandError> {
        let (machine, loaded) = self.config.read()?;
        let mut list = MitigationCatalogue::clone(&*catalogue().map_err(CommandError::failed)?);
        let build = self.build(&loaded.dirs(&machine)?.data)?;
        if let Some(provenance) = build.as_ref().and_then(|(facts, _)| facts.provenance.as_ref()) {
            list = own_sets::with_build(list, provenance)?;
        }
        let sets = loaded.patch_sets(&machine)?;
        Ok(MitigationsForBuild { list: own_sets::with_folders(list, &sets)?, build })
    }

    fn build(&self, data: &Path) -> Result<Option<NamedBuild>, CommandError> {
        if let Some(number) = self.build.as_deref().and_then(build_number) {
            let facts = BuildFacts { binary: PathBuf::new(), number: Some(number), provenance: None };
            return Ok(Some((facts, format!("b{number}"))));
        }
        let found = store::find_build(data, self.build.as_deref()).map_err(CommandError::failed)?;
        if let (Some(id), None) = (&self.build, &found) {
            return Err(CommandError::usage(
                format!("--build {id}: there is no such build in the store"),
                "`llama-warden builds list` shows them; a number of llama.cpp is written like b8840",
            ));
        }
        Ok(found.map(|build| {
            let id = build.facts.provenance.as_ref().map(|own| own.id.clone()).unwrap_or_default();
            let newest = if self.build.is_none() { ", the newest of the store" } else { "" };
            (build.facts, format!("build {id}{newest}"))
        }))
    }
}

/// An id in the store may also begin with `b`, but is longer than any build number.
fn build_number(text: &str) -> Option<u32> {
    text.strip_prefix('b').filter(|digits| digits.len() <= 6)?.parse().ok()
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum MemoryArg {
    /// Memory of the process itself.
    Host,
    /// Memory of the GPU.
    Vram,
}

impl From<MemoryArg> for LeakMemory {
    fn from(arg: MemoryArg) -> Self {
        match arg {
            MemoryArg::Host => Self::Host,
            MemoryArg::Vram => Self::Vram,
        }
    }
}

pub(crate) fn run(command: &MitigationsCommand) -> Result<(), CommandError> {
    let (MitigationsCommand::List { which, .. } | MitigationsCommand::Show { which, .. }) = command;
    let known = which.find()?;
    let all = &known.list;
    match command {
        MitigationsCommand::List { backend, memory, json, .. } => {
            let chosen =
                MitigationSelection::filtered(all, backend.as_deref(), memory.map(LeakMemory::from))?;
            let chosen = MitigationSelection { here: known.build.as_ref(), ..chosen };
            if *json { out::print_json(&chosen.json()) } else { out::print_text(&chosen.text()) }
        }
        MitigationsCommand::Show { id, json, .. } => match (all.mitigation(id), all.leak(id)) {
            (Some(entry), _) if *json => out::print_json(&entry_json(entry, known.build.as_ref())),
            (Some(entry), _) => out::print_text(&mitigation_text(all, entry, known.build.as_ref())),
            (None, Some(leak)) if *json => out::print_json(leak),
            (None, Some(leak)) => out::print_text(&leak_text(leak)),
            (None, None) => {
                let near = all.nearest(id, true).map(|near| format!("the nearest is `{near}`; "));
                Err(CommandError::usage(
                    format!("there is no mitigation and no leak `{id}`"),
                    format!("{}`llama-warden mitigations list` shows all", near.unwrap_or_default()),
                ))
            }
        },
    }
}

struct MitigationSelection<'a> {
    mitigations: Vec<&'a MitigationEntry>,
    leaks: Vec<&'a KnownLeak>,
    /// Mitigations of other backends: the table does not name them as cures.
    unsuitable: Vec<&'a str>,
    here: Option<&'a NamedBuild>,
}

type NamedBuild = (BuildFacts, String);

/// Returns the mitigation's state in the build, and whether the build contains it. Empty without a build.
fn state_in_build(entry: &MitigationEntry, build: Option<&NamedBuild>) -> String {
    let Some((facts, _)) = build else { return String::new() };
    let life = facts.mitigation_state(entry).map(|life| life.is.name());
    let fixes = facts.provenance.as_ref().and_then(|provenance| provenance.fixes.as_ref());
    let has = fixes.is_some_and(|fixes| fixes.contains(&entry.id)).then_some("built in");
    life.into_iter().chain(has).collect::<Vec<_>>().join(", ")
}

fn entry_json(entry: &MitigationEntry, build: Option<&NamedBuild>) -> Value {
    let mut value = json!(entry);
    if let (Some(object), Some((facts, name))) = (value.as_object_mut(), build) {
        object.insert("here".to_owned(), json!({ "build": name, "life": facts.mitigation_state(entry) }));
    }
    value
}

impl<'a> MitigationSelection<'a> {
    fn filtered(
        all: &'a MitigationCatalogue,
        backend: Option<&str>,
        memory: Option<LeakMemory>,
    ) -> Result<Self, CommandError> {
        if let Some(asked) = backend {
            let mut known: Vec<&str> = vec!["cpu"];
            known.extend(all.mitigations().iter().flat_map(|entry| &entry.backends).map(String::as_str));
            known.extend(all.leaks().iter().flat_map(|leak| &leak.backends).map(String::as_str));
            known.sort_unstable();
            known.dedup();
            if !known.contains(&asked) {
                let message = format!("--backend {asked}: there is no such backend");
                return Err(CommandError::usage(message, format!("known are {}", known.join(", "))));
            }
        }
        let fits = |own: &[LeakMemory]| memory.is_none_or(|asked| own.contains(&asked));
        let entries = all.mitigations().iter().map(|entry| &**entry);
        let (suitable, other): (Vec<_>, Vec<_>) =
            entries.partition(|entry| backend.is_none_or(|asked| entry.is_for(asked)));
        let leaks = all.leaks().iter();
        Ok(Self {
            mitigations: suitable.into_iter().filter(|entry| fits(&entry.memory)).collect(),
            unsuitable: other.into_iter().map(|entry| entry.id.as_str()).collect(),
            leaks: leaks
                .filter(|leak| fits(&leak.memory) && backend.is_none_or(|asked| leak.is_for(asked)))
                .collect(),
            here: None,
        })
    }

    fn json(&self) -> Value {
        let entries: Vec<Value> = self.mitigations.iter().map(|entry| entry_json(entry, self.here)).collect();
        json!({ "mitigations": entries, "leaks": self.leaks })
    }

    fn text(&self) -> String {
        let mut rows = vec![
            ["MITIGATION", "KIND", "MEMORY", "BACKENDS", "BUILDS", "WHAT IT DOES"]
                .map(str::to_owned)
                .to_vec(),
        ];
        if self.here.is_some() {
            rows[0].insert(5, "HERE".to_owned());
        }
        rows.extend(self.mitigations.iter().map(|entry| {
            let mut row = vec![
                entry.usage(),
                entry.action.kind().to_owned(),
                memory_text(&entry.memory),
                backends_text(&entry.backends),
                entry.builds(),
                entry.title.clone(),
            ];
            if self.here.is_some() {
                row.insert(5, state_in_build(entry, self.here));
            }
            row
        }));
        let mut text = out::format_table(&rows);
        text.push('\n');
        let rows = self.leaks.iter().map(|leak| {
            let suits = |cure: &&mitigation::LeakCure| {
                cure.mitigation.as_deref().is_none_or(|id| !self.unsuitable.contains(&id))
            };
            let cures: Vec<String> =
                leak.cures.iter().filter(suits).map(mitigation::LeakCure::short).collect();
            vec![
                leak.id.clone(),
                memory_text(&leak.memory),
                backends_text(&leak.backends),
                leak.builds(),
                cures.join(", "),
            ]
        });
        text.push_str(&out::table(["LEAK, DEFECT", "MEMORY", "BACKENDS", "BUILDS", "WHAT HELPS"], rows));
        text.push_str(
            "\n`llama-warden mitigations show ID` shows the rest: symptoms, cost, evidence, references.\n",
        );
        if let Some((_, name)) = self.here {
            text.extend(["HERE is ", name.as_str(), "; --build asks for another one.\n"]);
        }
        text
    }
}

fn memory_text(all: &[LeakMemory]) -> String {
    all.iter().map(|one| one.name()).collect::<Vec<_>>().join(" ")
}

fn backends_text(all: &[String]) -> String {
    match all {
        [] => "all".to_owned(),
        [one, two, three, rest @ ..] if !rest.is_empty() => format!("{one} {two} {three} +{}", rest.len()),
        all => all.join(" "),
    }
}

/// Lines `name: text` with aligned texts; skips empty texts.
struct MitigationSheet(Vec<(&'static str, String)>);

impl MitigationSheet {
    fn add(&mut self, name: &'static str, text: impl Into<String>) {
        let text = text.into();
        if !text.trim().is_empty() {
            self.0.push((name, text));
        }
    }

    fn evidence(&mut self, all: &[FixEvidence]) {
        for one in all {
            self.add("seen", one.to_line());
        }
    }

    fn text(self) -> String {
        let width = self.0.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
        let lines: Vec<String> = self.0.iter().map(|(name, text)| format!("{name:width$}  {text}")).collect();
        lines.join("\n") + "\n"
    }
}

fn mitigation_text(all: &MitigationCatalogue, entry: &MitigationEntry, build: Option<&NamedBuild>) -> String {
    let mut sheet = MitigationSheet(Vec::new());
    sheet.add("mitigation", entry.usage());
    sheet.add("does", entry.title.clone());
    sheet.add("", entry.text.clone());
    sheet.add("how", entry.how());
    sheet.add("from", entry.own.as_ref().map(|own| format!("a set of your own: {own}")).unwrap_or_default());
    if let Some(value) = &entry.value {
        let default =
            value.default.as_ref().map(|own| format!("; without one it is {own}")).unwrap_or_default();
        sheet.add("value", format!("{}{default}", value.description()));
    }
    for part in &entry.parts {
        let takes = part.value.as_ref().map_or_else(String::new, |spec| {
            let default = spec.default.as_ref().map(|own| format!("; without it {own}, with `off` unset"));
            format!("; {}{}", spec.description(), default.unwrap_or_default())
        });
        sheet.add("part", format!("{}.{}: {} ({}{takes})", entry.id, part.name, part.text, part.variable));
    }
    sheet.add("memory", memory_text(&entry.memory));
    sheet
        .add("backends", if entry.backends.is_empty() { "all".to_owned() } else { entry.backends.join(" ") });
    sheet.add("builds", entry.builds());
    for id in &entry.cures {
        let title = all.leak(id).map(|leak| leak.title.as_str()).unwrap_or_default();
        sheet.add("against", format!("{id}: {title}"));
    }
    for symptom in &entry.symptoms {
        sheet.add("symptom", symptom.clone());
    }
    sheet.add("cost", entry.cost.clone());
    sheet.add("risk", entry.risk.clone());
    if let Some(upstream) = &entry.upstream {
        let status = json!(upstream.status).as_str().unwrap_or_default().to_owned();
        let said = [&status, &upstream.since, &upstream.how].into_iter().filter(|said| !said.is_empty());
        sheet.add("upstream", said.cloned().collect::<Vec<_>>().join("; "));
    }
    if let Some((facts, name)) = build {
        let life = facts.mitigation_state(entry).map_or_else(
            || "nothing is known of that".to_owned(),
            |life| {
                format!(
                    "{}{}: {}",
                    life.is.name(),
                    if life.by_source { ", as its source shows" } else { "" },
                    life.reason()
                )
            },
        );
        sheet.add("here", format!("{name}: {life}"));
    }
    for life in &entry.life {
        sheet.add("life", life.to_string());
    }
    sheet.evidence(&entry.evidence);
    sheet.add("confidence", entry.confidence.clone());
    sheet.add("references", entry.references.join(" "));
    sheet.text()
}

fn leak_text(leak: &KnownLeak) -> String {
    let mut sheet = MitigationSheet(Vec::new());
    sheet.add("leak", leak.id.clone());
    sheet.add("is", leak.title.clone());
    sheet.add("kind", json!(leak.kind).as_str().unwrap_or_default());
    sheet.add("memory", memory_text(&leak.memory));
    sheet.add("backends", if leak.backends.is_empty() { "all".to_owned() } else { leak.backends.join(" ") });
    let range = [leak.builds(), leak.range.clone()].into_iter().filter(|part| !part.is_empty());
    sheet.add("builds", range.collect::<Vec<_>>().join("; "));
    sheet.add("symptom", leak.symptom.clone());
    sheet.add("upstream", leak.upstream.clone());
    for cure in &leak.cures {
        sheet.add("helps", cure.to_string());
    }
    sheet.add("to tell", leak.detect.clone());
    sheet.evidence(&leak.evidence);
    sheet.add("confidence", leak.confidence.clone());
    sheet.add("references", leak.references.join(" "));
    sheet.text()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> &'static MitigationCatalogue {
        static ALL: std::sync::LazyLock<std::sync::Arc<MitigationCatalogue>> =
            std::sync::LazyLock::new(|| catalogue().unwrap());
        &ALL
    }

    #[test]
    fn filters_leave_what_has_to_do_with_backend_and_memory() {
        let ids = |backend: Option<&str>, memory| {
            let chosen = MitigationSelection::filtered(all(), backend, memory).unwrap();
            chosen.mitigations.iter().map(|entry| entry.id.clone()).collect::<Vec<_>>()
        };
        let has = |list: &[String], id: &str| list.iter().any(|own| own == id);
        let everything = ids(None, None);
        assert!(has(&everything, "no-cuda-graphs") && has(&everything, "build-no-hip-graphs"));
        let cuda = ids(Some("cuda"), None);
        assert!(
            has(&cuda, "no-cuda-graphs") && has(&cuda, "cache-ram") && !has(&cuda, "build-no-hip-graphs")
        );
        let host = ids(Some("cuda"), Some(LeakMemory::Host));
        assert!(has(&host, "cache-ram") && !has(&host, "kv-f16"));
        let leaks =
            MitigationSelection::filtered(all(), Some("opencl"), Some(LeakMemory::Host)).unwrap().leaks;
        assert!(
            leaks.iter().any(|leak| leak.id == "opencl-leaks")
                && leaks.iter().all(|leak| leak.is_for("opencl"))
        );
        let error = MitigationSelection::filtered(all(), Some("cude"), None).err().unwrap();
        assert_eq!(error.code(), 2);
    }

    #[test]
    fn everything_that_is_listed_can_be_shown_with_what_it_costs_and_is_for() {
        for entry in all().mitigations() {
            let text = mitigation_text(all(), entry, None);
            for word in [entry.id.as_str(), "\ncost ", "\nsymptom", "\nhow "] {
                assert!(text.contains(word), "{word} is missing in\n{text}");
            }
        }
        for leak in all().leaks() {
            let text = leak_text(leak);
            assert!(
                text.contains(&leak.id) && text.contains("\nsymptom") && text.contains("\nconfidence"),
                "{text}"
            );
        }
        assert_eq!(
            run(&MitigationsCommand::Show {
                id: "no-cuda-graph".into(),
                json: false,
                which: TargetBuildArgs::default()
            })
            .unwrap_err()
            .code(),
            2
        );
    }

    #[test]
    fn what_can_be_done_is_a_table_and_each_of_it_a_sheet() {
        insta::assert_snapshot!("the_list", MitigationSelection::filtered(all(), None, None).unwrap().text());
        let sheets = ["no-cuda-graphs", "cache-ram", "graph-cache-cap", "build-one-copy"]
            .map(|id| mitigation_text(all(), all().mitigation(id).unwrap(), None));
        let leaks = ["cuda-graph-window", "opencl-leaks"].map(|id| leak_text(all().leak(id).unwrap()));
        insta::assert_snapshot!("the_sheets", [sheets.join("\n"), leaks.join("\n")].join("\n"));
        let unknown = run(&MitigationsCommand::Show {
            id: "no-cuda-graph".into(),
            json: false,
            which: TargetBuildArgs::default(),
        });
        let backend = MitigationSelection::filtered(all(), Some("cude"), None);
        let told = [unknown.err().unwrap(), backend.err().unwrap()].map(|error| error.lines().join("\n"));
        insta::assert_snapshot!("what_is_not_there", told.join("\n"));
    }

    #[test]
    fn programs_get_the_same_list() {
        let json = MitigationSelection::filtered(all(), None, None).unwrap().json();
        let find = |key: &str, id: &str| {
            json[key].as_array().unwrap().iter().find(|entry| entry["id"] == id).cloned().unwrap_or_default()
        };
        let entry = find("mitigations", "no-cuda-graphs");
        assert_eq!(
            (&entry["kind"], &entry["name"], &entry["presence"]),
            (&json!("variable"), &json!("GGML_CUDA_DISABLE_GRAPHS"), &json!(true))
        );
        assert_eq!(find("mitigations", "cache-ram")["value"]["max"], json!(16_777_216.0));
        assert!(find("leaks", "cuda-graph-window")["cures"].as_array().is_some_and(|cures| cures.len() > 3));
        assert_eq!(json["leaks"].as_array().map(Vec::len), Some(all().leaks().len()));
    }

    #[test]
    fn a_list_for_a_build_says_what_is_needed_there_and_what_is_superseded() {
        let at = |number: u32| {
            let facts = BuildFacts { binary: PathBuf::new(), number: Some(number), provenance: None };
            (facts, format!("b{number}"))
        };
        let ids = ["graph-cache-cap", "pool-purge", "cublas-reset", "cublas-workspace", "no-mmap"];
        let mut told = String::new();
        for build in [at(8827), at(8840), at(10_587)] {
            for id in ids {
                let entry = all().mitigation(id).unwrap();
                told.extend([build.1.as_str(), " ", id, ": ", &state_in_build(entry, Some(&build)), "\n"]);
            }
        }
        // A needed fix that the build has differs from a needed one that it lacks.
        let mut with = at(8827);
        let fixes = Some(vec!["graph-cache-cap".to_owned()]);
        with.0.provenance = Some(mitigation::ProvenanceFacts { fixes, ..Default::default() });
        let id = "graph-cache-cap";
        told.extend(["with ", id, ": ", &state_in_build(all().mitigation(id).unwrap(), Some(&with)), "\n"]);
        let build = at(10_587);
        let chosen = MitigationSelection::filtered(all(), Some("cuda"), None).unwrap();
        let text = MitigationSelection { here: Some(&build), ..chosen }.text();
        told.extend(
            text.lines()
                .filter(|line| {
                    line.starts_with("MITIGATION") || line.contains("pool-purge") || line.contains("HERE is")
                })
                .map(|line| format!("{}\n", line.trim_end())),
        );
        let sheet = mitigation_text(all(), all().mitigation("cublas-reset").unwrap(), Some(&build));
        told.extend(
            sheet
                .lines()
                .filter(|line| line.starts_with("here") || line.starts_with("life"))
                .map(|line| format!("{line}\n")),
        );
        insta::assert_snapshot!(told);
        assert_eq!(
            (build_number("b8840"), build_number("b884012345678901"), build_number("8840")),
            (Some(8840), None, None)
        );
    }
}
