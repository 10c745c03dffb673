//! `patches prove`: proves sets in an unreviewed tree, as far as this machine can, and records the proof next
//! to the configuration. A record is valid only for exactly this code. Only this command creates records.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use warden_builder::prove::{self, BuildPair, compare_builds, run_conformance};
use warden_builder::{
    BuildPlan, BuildRequest, BuildSource, Builder, BuilderError, ComputeBackend, StoredBuild,
};
use warden_config::resolve::proofs;
use warden_patches::prove::{ProofRecords, ProofStep, SetProof, StepResult, assemble_program};
use warden_patches::set::SetOrigin;
use warden_patches::{
    PatchSeries, PatchSet, PatchStatus, SelectedSets, SetCatalogue, SetJudgement, SetSelection,
};
use warden_policies::defaults::Build;

use super::{OpenedTree, SourceArgs, run_blocking};
use crate::cli::build::{self, CatalogueArgs, with_builder};
use crate::cli::shared::{ConfigArgs, block_on};
use crate::exit::CommandError;
use crate::out;

#[expect(clippy::struct_excessive_bools, reason = "a command line has flags")]
#[derive(Debug, Args)]
pub(crate) struct ProveArgs {
    /// Sets, by their ids. Default: every set that fits and is not verified there.
    #[arg(value_name = "SET")]
    sets: Vec<String>,
    #[command(flatten)]
    source: SourceArgs,
    /// Uses the pinned source archive of llama-cpp-python, downloaded through pip.
    #[arg(long, conflicts_with_all = ["source", "git", "reference", "offline"])]
    sdist: bool,
    #[command(flatten)]
    catalogue: CatalogueArgs,
    /// Shows the unknown code and the planned steps, and does nothing.
    #[arg(long)]
    plan: bool,
    /// Builds no llama-server: only compiles and runs the set's own program.
    #[arg(long)]
    no_servers: bool,
    /// Proves sets again that are already verified there.
    #[arg(long)]
    again: bool,
    /// Prints JSON, for programs.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

struct ProofSubject {
    set: PatchSet,
    judgement: SetJudgement,
}

pub(super) fn run(args: &ProveArgs) -> Result<(), CommandError> {
    block_on(prove_sets(args))?
}

struct EndedProof {
    proof: SetProof,
    failed: bool,
    /// The proof shows that the set is good.
    good: bool,
}

async fn prove_sets(args: &ProveArgs) -> Result<(), CommandError> {
    let (machine, loaded) = args.config.read()?;
    let catalogue = args.catalogue.load(&loaded, &machine)?;
    for id in &args.sets {
        catalogue.require(id)?;
    }
    let file = proofs::proofs_path(&loaded, &machine)?;
    // Read the records first: an unreadable file must stop the command before any work.
    let mut known = proofs::read_proofs(&file)?;
    let numbers = &loaded.settings.build;
    let (found, source, subjects) = with_builder(&loaded, &machine, async |builder| {
        judge_subjects(args, &builder, numbers, catalogue.sets().to_vec(), known.clone()).await
    })
    .await?;
    let chosen = select_subjects(args, subjects, &found.label)?;
    let told: String = chosen.iter().map(|subject| describe_unknown_code(subject, &found.label)).collect();
    if !args.json {
        out::print_text(&told)?;
    }
    if args.plan {
        return Ok(());
    }
    let mut ended = Vec::new();
    for subject in &chosen {
        let proof = with_builder(&loaded, &machine, async |builder| {
            let run =
                ProofRun { subject, found: &found, source: &source, builder, catalogue: &catalogue, numbers };
            Box::pin(run.prove(args.no_servers)).await
        })
        .await?;
        if !args.json {
            out::print_line(&format!("{} in {}:", subject.set.id, found.label))?;
            for step in &proof.steps {
                out::print_line(&format!("  {step}"))?;
            }
        }
        let failed = proof.steps.iter().any(|step| step.how == StepResult::Failed);
        let good = !failed && proof.steps.iter().any(|step| step.how == StepResult::Shown);
        if good {
            known.add(proof.clone());
        }
        ended.push(EndedProof { proof, failed, good });
    }
    if ended.iter().any(|one| one.good) {
        proofs::write_proofs(&file, &known)?;
    }
    print_records(args, &file, &ended)?;
    check_all_shown(&ended)
}

async fn judge_subjects(
    args: &ProveArgs,
    builder: &Builder,
    numbers: &Build,
    all: Vec<PatchSet>,
    known: ProofRecords,
) -> Result<(OpenedTree, BuildSource, Vec<ProofSubject>), CommandError> {
    let pinned = if args.sdist { Some(build::resolve_source(builder, None, numbers).await?) } else { None };
    let (found, source) = args.source.open_with(pinned, builder, numbers).await?;
    run_blocking(move || {
        let sets: Vec<&PatchSet> = all.iter().collect();
        let judged = PatchSeries::judge(&sets, found.tree.as_ref())?.accept(&sets, &known).judgements;
        let subjects = all.into_iter().zip(judged).map(|(set, judgement)| ProofSubject { set, judgement });
        Ok((found, source, subjects.collect()))
    })
    .await
}

fn print_records(args: &ProveArgs, file: &Path, ended: &[EndedProof]) -> Result<(), CommandError> {
    if args.json {
        let all = ended.iter().map(|one| json!({ "recorded": one.good, "proof": one.proof }));
        return out::print_json(&json!({ "file": file, "sets": all.collect::<Vec<_>>() }));
    }
    let good: Vec<&str> = ended.iter().filter(|one| one.good).map(|one| one.proof.set.as_str()).collect();
    if good.is_empty() {
        return Ok(());
    }
    out::print_line(&format!(
        "recorded in {}: with this configuration `build` takes {} as locally verified for just this code",
        file.display(),
        good.join(", ")
    ))
}

fn check_all_shown(ended: &[EndedProof]) -> Result<(), CommandError> {
    let told = ended.iter().filter(|one| !one.good).map(|one| {
        let why = if one.failed {
            "is not shown to be good there, as something failed"
        } else {
            "could not be shown on this machine"
        };
        format!("the set `{}` {why}, so nothing was recorded for it", one.proof.set)
    });
    let told: Vec<String> = told.collect();
    if told.is_empty() {
        return Ok(());
    }
    Err(CommandError::Refused {
        message: told.join("\n"),
        hint: "read what is above; --allow-unverified of `build` takes a set all the same, and says so"
            .to_owned(),
    })
}

fn select_subjects(
    args: &ProveArgs,
    all: Vec<ProofSubject>,
    label: &str,
) -> Result<Vec<ProofSubject>, CommandError> {
    let named = |subject: &ProofSubject| args.sets.contains(&subject.set.id);
    let mut chosen = Vec::new();
    for subject in all {
        let id = &subject.set.id;
        let judgement = &subject.judgement;
        let wanted =
            if args.sets.is_empty() { judgement.status == PatchStatus::Unverified } else { named(&subject) };
        match judgement.status {
            PatchStatus::Verified | PatchStatus::LocallyVerified
                if args.again && (args.sets.is_empty() || named(&subject)) =>
            {
                chosen.push(subject);
            }
            _ if !wanted => {}
            PatchStatus::Unverified if judgement.can_be_proved() => chosen.push(subject),
            PatchStatus::Verified | PatchStatus::LocallyVerified => out::error_line(&format!(
                "note: {id} is {} in {label} already: nothing is to be shown; --again shows it all the same",
                judgement.status
            )),
            PatchStatus::NotApplicable | PatchStatus::Superseded => {
                out::error_line(&format!(
                    "note: {id} is {} in {label}: nothing is to be shown",
                    judgement.status
                ));
            }
            PatchStatus::Refused | PatchStatus::Unverified => {
                let reasons: Vec<String> =
                    judgement.reasons.iter().map(|reason| format!("\n  {reason}")).collect();
                let why = if judgement.status == PatchStatus::Refused {
                    "does not fit"
                } else {
                    "leans on code that no seam of it pins, so that a record could not say what it is for,"
                };
                return Err(CommandError::Refused {
                    message: format!("the set `{id}` {why} in {label}:{}", reasons.concat()),
                    hint: "only a set that fits, and leans on versions of code that nobody has looked at, can be shown \
                           to be good"
                        .to_owned(),
                });
            }
        }
    }
    if chosen.is_empty() {
        out::error_line(&format!("note: no set is to be shown in {label}"));
    }
    Ok(chosen)
}

fn describe_unknown_code(subject: &ProofSubject, label: &str) -> String {
    let ProofSubject { set, judgement } = subject;
    let unknown: Vec<&str> =
        judgement.seams.iter().filter(|seam| seam.known.is_none()).map(|seam| seam.seam.as_str()).collect();
    let mut text = format!(
        "{} in {label}: {}; of {} seams {} nobody has looked at{}\n",
        set.id,
        if judgement.status == PatchStatus::Unverified { "hooks and probes hold" } else { "it is verified" },
        judgement.seams.len(),
        unknown.len(),
        if unknown.is_empty() { String::new() } else { format!(" ({})", unknown.join(", ")) },
    );
    for reason in &judgement.reasons {
        text.extend(["  new  ", &reason.to_string(), "\n"]);
    }
    if let Some(own) = &set.conformance {
        text.extend(["  plays ", &own.scenarios.len().to_string(), " scenarios ", &own.title, "\n"]);
    }
    text
}

struct ProofRun<'a> {
    subject: &'a ProofSubject,
    found: &'a OpenedTree,
    source: &'a BuildSource,
    builder: Builder,
    catalogue: &'a SetCatalogue,
    numbers: &'a Build,
}

impl ProofRun<'_> {
    async fn prove(&self, no_servers: bool) -> Result<SetProof, CommandError> {
        let ProofSubject { set, judgement } = self.subject;
        let OpenedTree { tree, label, shown } = self.found;
        let commit = tree.revision().commit.as_ref().map(|commit| format!(", {commit}")).unwrap_or_default();
        let mut proof = SetProof::new(set, judgement, format!("{label} ({shown}{commit})"), prove::now());
        proof.host = prove::host_description();
        if let Some(edits) = &judgement.edits
            && let Some(program) = assemble_program(set, edits, tree.as_ref())?
            && let Some(own) = &set.conformance
        {
            let (steps, tools) = run_conformance(&self.builder, own, &program).await?;
            proof.steps.extend(steps);
            proof.tools.extend(tools);
        }
        if proof.steps.iter().any(|step| step.how == StepResult::Failed) {
            return Ok(proof);
        }
        if no_servers {
            proof.steps.push(not_shown(SAME_ANSWERS, "--no-servers"));
            return Ok(proof);
        }
        // Build for the GPU if the machine has a toolkit, else for the CPU.
        match self.builder.plan(&self.request(SelectedSets::None)).await {
            Ok(plan) => self.compare_servers(&mut proof, &plan).await?,
            Err(error) => proof.steps.push(not_shown(SAME_ANSWERS, &build_failure_reason(error)?)),
        }
        Ok(proof)
    }

    fn request(&self, sets: SelectedSets) -> BuildRequest {
        let selection = SetSelection {
            catalogue: self.catalogue.clone(),
            sets,
            allow_unverified: true,
            ..SetSelection::default()
        };
        build::build_request(self.source.clone(), selection, self.numbers)
    }

    async fn build(&self, sets: SelectedSets, backend: ComputeBackend) -> Result<StoredBuild, BuilderError> {
        let options = vec!["LLAMA_BUILD_UI=OFF".to_owned()];
        self.builder.build(&BuildRequest { backend: backend.into(), options, ..self.request(sets) }).await
    }

    /// Compares servers of the tree with and without patches, on the backend of `auto` or on the CPU.
    async fn compare_servers(&self, proof: &mut SetProof, auto: &BuildPlan) -> Result<(), CommandError> {
        let set = &self.subject.set;
        let here = auto.recipe.backend;
        let backend = if set.is_for(here.name()) { here } else { ComputeBackend::Cpu };
        if !set.is_for(backend.name()) {
            let text = format!(
                "this machine builds for {here}, and the set is for {}: no GPU with its toolkit is here",
                set.backends.join(", ")
            );
            proof.steps.extend([
                not_shown(SAME_ANSWERS, &text),
                not_shown("counters move, and what is hoarded comes back, on a GPU", "the same"),
                not_shown("compute-sanitizer's memcheck finds nothing", "the same"),
            ]);
            return Ok(());
        }
        let plain = match self.build(SelectedSets::None, backend).await {
            Ok(built) => built,
            Err(error) => {
                let text = format!("the plain tree cannot be built here: {}", build_failure_reason(error)?);
                proof.steps.push(not_shown(SAME_ANSWERS, &text));
                return Ok(());
            }
        };
        let patched = match self.build(SelectedSets::Only(vec![set.id.clone()]), backend).await {
            Ok(built) => built,
            Err(error) => {
                let what = "the patched tree can be built".to_owned();
                let text = build_failure_reason(error)?;
                proof.steps.push(ProofStep { what, how: StepResult::Failed, text });
                return Ok(());
            }
        };
        proof.tools.push(format!("builds {} (plain) and {} (patched)", plain.id, patched.id));
        let devices = &patched.provenance.verified.devices;
        if let Some(toolkit) = &auto.toolkit {
            proof.tools.push(toolkit.tool.version.clone());
            proof.tools.extend(devices.clone());
        }
        let gpu = backend.has_gpu() && !devices.is_empty();
        if backend.has_gpu() && !gpu {
            proof
                .steps
                .push(not_shown("on a GPU", "the build sees none here, so its servers ran on the CPU"));
        }
        let pair = BuildPair {
            plain: &plain.binary,
            patched: &patched.binary,
            fixes: patched.provenance.fixes().iter().filter_map(|id| set.fix(id)).collect(),
            gpu,
            sanitizer: find_sanitizer(
                &self.builder,
                auto.toolkit.as_ref().map(|toolkit| toolkit.home.as_path()),
            ),
            limit: self.numbers.verify_timeout,
            patience: prove::PART_TIMEOUT,
        };
        proof.steps.extend(compare_builds(&self.builder, &pair).await?);
        if set.origin == SetOrigin::Embedded && !backend.has_gpu() && !set.backends.is_empty() {
            proof.steps.push(not_shown("on a GPU", "none with its toolkit is here"));
        }
        Ok(())
    }
}

const SAME_ANSWERS: &str = "servers of this tree, plain and patched, answer the same";

fn not_shown(what: &str, text: &str) -> ProofStep {
    ProofStep { what: what.to_owned(), how: StepResult::NotShown, text: text.to_owned() }
}

/// Returns the reason; a cancelled build is an error, which ends the command.
fn build_failure_reason(error: BuilderError) -> Result<String, CommandError> {
    match error {
        BuilderError::Cancelled => Err(error.into()),
        error => Ok(first_lines(&error.to_string())),
    }
}

fn first_lines(text: &str) -> String {
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let first = lines.next().unwrap_or_default();
    let next = lines.next().filter(|_| first.ends_with(':'));
    next.map_or_else(|| first.to_owned(), |next| format!("{first} {next}"))
}

fn find_sanitizer(builder: &Builder, toolkit: Option<&Path>) -> Option<PathBuf> {
    let name = "compute-sanitizer";
    let inside = || {
        let path = toolkit?.join("bin").join(name);
        path.is_file().then_some(path)
    };
    builder.env.find(name).or_else(inside)
}

#[cfg(test)]
mod tests {
    use warden_patches::SourceTree;

    use super::*;

    /// A tree with this queue, whose slots have no checkpoints.
    struct QueueTree(String);
    impl SourceTree for QueueTree {
        fn read(&self, path: &str) -> warden_patches::Result<Option<Vec<u8>>> {
            Ok(match path {
                "tools/server/server-queue.cpp" => Some(self.0.clone().into_bytes()),
                "tools/server/server-context.cpp" => {
                    Some(b"struct server_slot {\n    int id;\n};\n".to_vec())
                }
                _ => None,
            })
        }
        fn revision(&self) -> warden_patches::SourceRevision {
            warden_patches::SourceRevision::default()
        }
    }

    #[test]
    fn why_a_build_failed_is_told_in_one_line() {
        let failed = BuilderError::Build {
            phase: "compiling",
            excerpt: "\n  ggml.h:187:22: error: invalid use of 'extern'\n  187 | extern".to_owned(),
            log: "/logs/1.log".into(),
            killed: false,
            no_room: false,
        };
        let told = build_failure_reason(failed).unwrap();
        assert_eq!(told, "compiling failed: ggml.h:187:22: error: invalid use of 'extern'");
        assert_eq!(first_lines("one line\nanother"), "one line");
    }

    #[test]
    fn what_is_new_is_told_with_the_place_and_the_seams_that_it_is_in() {
        let mut set = SetCatalogue::embedded().unwrap().set("server").unwrap().clone();
        set.fingerprints = warden_patches::set::fingerprints::SeamFingerprints::default();
        let text = "#include \"log.h\"\nresult queue::recv_with_timeout(int timeout) {\n    while (true) {\n        \
                    std::cv_status cr_res = condition_results.wait_for(lock, std::chrono::seconds(timeout));\n    }\n}\n";
        let judgement = warden_patches::judge(&set, &QueueTree(text.to_owned())).unwrap();
        assert_eq!(judgement.status, PatchStatus::Unverified, "{:?}", judgement.reasons);
        insta::assert_snapshot!(describe_unknown_code(&ProofSubject { set, judgement }, "b9000"));
    }
}
