//! A diagnosis that is started from the page: `llama-warden diagnose` as a process of its own beside what serves, because it takes minutes to
//! hours, and what goes wrong with it must not go wrong with us. Its report lies among all others.
//!
//! ```text
//!   asked ── a spare moment? ── no: why ──> refused
//!              └ yes ── process: dies with us however we die ── it ends ─────────────────────> ended: what was found
//!                            │ somebody ends it, its time is over, a model waits for memory,
//!                            │ we end, another program takes our place
//!                            └──> told to end, so that it writes what it has; killed if it does not
//! ```
//!
//! | module | job |
//! |---|---|
//! | [`spare`] | whether it may begin, whether it has to end; pure |
//! | [`words`] | its command line, its exit code; pure |
//! | [`told`] | what it says, bounded |
//! | [`look`] | the facts of a moment |
//! | [`run`] | the process |

mod look;
mod run;
pub(crate) mod spare;
mod told;
mod words;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::Serialize;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warden_policies::experiment::Workload;
use warden_policies::{ModelName, defaults};
use warden_supervisor::nursery::NurseryHandle;
use warden_supervisor::{Command, EventKind, SpawnRequest, WorkKind, run_job};

pub(crate) use self::spare::Refused;
use self::told::Told;
pub(crate) use self::words::{WORKLOADS, Words, workload};
use crate::admin::answer::Admin;
use crate::admin::page::hub::Outcome;
use crate::admin::page::reports;
use crate::clock;
use crate::sync::lock;

/// Diagnoses of one instance, one at a time. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Diagnoses {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Who makes processes; none in tests.
    nursery: Option<NurseryHandle>,
    words: Words,
    numbers: Numbers,
    state: Mutex<State>,
    /// No more of them: we end, or another program takes our place.
    over: CancellationToken,
    tasks: TaskTracker,
}

/// The disk of the state directory is waited for no longer: tasks that serve share our threads.
const DISK_ANSWERS: Duration = Duration::from_secs(5);

/// What is kept of memory for whatever comes, and how long one may take.
#[derive(Clone, Debug)]
pub(crate) struct Numbers {
    pub(crate) loading: warden_policies::loading::Numbers,
    pub(crate) limit: Duration,
    pub(crate) grace: Duration,
}

impl Numbers {
    /// As they are configured.
    pub(crate) fn of(loading: &warden_policies::loading::Numbers, own: &defaults::Diagnose) -> Self {
        Self { loading: loading.clone(), limit: own.beside_limit, grace: own.beside_grace }
    }
}

#[derive(Debug, Default)]
struct State {
    now: Option<Running>,
    last: Option<Ended>,
}

/// One that runs.
#[derive(Debug)]
struct Running {
    model: String,
    about: About,
    told: Told,
    /// Cancelled by whoever ends it.
    end: CancellationToken,
    /// The reason to end it, as soon as there is one.
    because: Option<String>,
}

/// What is known of one from its beginning on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct About {
    pub(crate) model: String,
    /// What kind of work; `None`: all that the server can do.
    pub(crate) workload: Option<Workload>,
    /// Who asked for it.
    pub(crate) by: String,
    /// RFC 3339.
    pub(crate) began: String,
    /// The name of its report.
    pub(crate) report: String,
}

/// One that has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Ended {
    #[serde(flatten)]
    pub(crate) about: About,
    /// RFC 3339.
    pub(crate) at: String,
    /// It came to a finding.
    pub(crate) found: bool,
    /// What was found, or why nothing was.
    pub(crate) outcome: String,
    /// Its report is there.
    pub(crate) has_report: bool,
    pub(crate) lines: Vec<String>,
}

/// What is shown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct View {
    pub(crate) now: Option<Now>,
    pub(crate) last: Option<Ended>,
}

/// One that runs, as it is shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Now {
    #[serde(flatten)]
    pub(crate) about: About,
    pub(crate) lines: Vec<String>,
    /// Why it is being ended, if it is.
    pub(crate) because: Option<String>,
}

impl Diagnoses {
    /// `words` say what this instance serves; none begins after `over`.
    pub(crate) fn new(
        nursery: Option<NurseryHandle>,
        words: Words,
        numbers: Numbers,
        over: CancellationToken,
    ) -> Self {
        let (state, tasks) = (Mutex::default(), TaskTracker::new());
        Self { inner: Arc::new(Inner { nursery, words, numbers, state, over, tasks }) }
    }

    /// What is shown now.
    pub(crate) fn view(&self) -> View {
        let state = lock(&self.inner.state);
        let now = state.now.as_ref().map(|now| Now {
            about: now.about.clone(),
            lines: now.told.lines(),
            because: now.because.clone(),
        });
        View { now, last: state.last.clone() }
    }

    /// Begins one of this model, if this is a spare moment. It goes on by itself.
    ///
    /// # Errors
    /// Why not.
    pub(crate) async fn begin(
        &self,
        admin: &Admin,
        model: &ModelName,
        workload: Option<Workload>,
        by: &str,
    ) -> Result<(), Refused> {
        let cannot = |why: &str| Err(Refused::Cannot(why.to_owned()));
        let inner = &self.inner;
        let Some(nursery) = inner.nursery.clone() else { return cannot("no processes are made here") };
        if admin.fleet.view().models.iter().any(|own| own.name == *model && own.remote.is_some()) {
            return cannot(
                "an endpoint of somebody else's serves it: there is no llama-server here to be tried",
            );
        }
        let folder = reports::folder(&admin.instance.ledger);
        let facts = look::facts_for(admin, &inner.numbers.loading, model, &folder).await;
        let report = report_name(model.as_str(), &clock::now_text());
        let path = folder.join(&report);
        let args = inner.words.all(model.as_str(), workload, &path);
        spare::may_begin(&facts)?;
        if facts.reports >= reports::LISTED {
            return Err(Refused::Full(facts.reports, folder.display().to_string()));
        }
        let place = folder.clone();
        let making = run_job(WorkKind::StateFiles, move || make_folder(&place));
        let made = timeout(DISK_ANSWERS, making).await;
        let made = made.map_err(io::Error::from).and_then(|made| made?);
        made.map_err(|error| Refused::Cannot(format!("{}: {error}", folder.display())))?;
        let about =
            About { model: model.to_string(), workload, by: by.to_owned(), began: clock::now_text(), report };
        let end = CancellationToken::new();
        {
            // Looked at under the lock: of two people who ask at once, the second hears of the first.
            let mut state = lock(&inner.state);
            if let Some(other) = &state.now {
                return Err(Refused::Another(other.model.clone()));
            }
            if inner.over.is_cancelled() {
                return Err(Refused::Ending);
            }
            state.now = Some(Running {
                model: model.to_string(),
                about: about.clone(),
                told: Told::default(),
                end: end.clone(),
                because: None,
            });
        }
        admin.fleet.note_asked(Some(model), "diagnose", by);
        let command = Command {
            wrapper: Vec::new(),
            // Whatever lies at our path by now.
            binary: PathBuf::from(format!("/proc/{}/exe", std::process::id())),
            args,
            env: Vec::new(),
            env_remove: Vec::new(),
            directory: None,
        };
        let request = SpawnRequest { command, oom_score_adj: run::FIRST_TO_GO };
        let (own, admin) = (self.clone(), admin.clone());
        inner.tasks.spawn(async move {
            let (found, outcome) = own.run(&admin, nursery, request, &end).await;
            let looking = run_job(WorkKind::StateFiles, move || discard_empty(&path));
            let has_report = matches!(timeout(DISK_ANSWERS, looking).await, Ok(Ok(true)));
            own.ended(&admin, about, has_report, found, outcome);
        });
        Ok(())
    }

    /// Ends the one that runs.
    ///
    /// # Errors
    /// None runs, or one of another model.
    pub(crate) fn end(&self, model: &str, by: &str) -> Result<(), Refused> {
        let mut state = lock(&self.inner.state);
        match &mut state.now {
            Some(now) if now.model == model => {
                now.because.get_or_insert_with(|| format!("ended by {by}"));
                now.end.cancel();
                Ok(())
            }
            Some(other) => Err(Refused::Another(other.model.clone())),
            None => Err(Refused::Cannot("no diagnosis runs".to_owned())),
        }
    }

    /// It is being ended for this reason; the first one counts.
    fn ends(&self, why: &str) {
        if let Some(now) = &mut lock(&self.inner.state).now {
            now.because.get_or_insert_with(|| why.to_owned());
        }
    }

    fn ended(&self, admin: &Admin, about: About, has_report: bool, found: bool, outcome: String) {
        let (model, report) = (ModelName::new(&about.model), has_report.then(|| about.report.clone()));
        let outcome = {
            let mut state = lock(&self.inner.state);
            let Some(mut now) = state.now.take() else { return };
            now.told.end();
            let outcome = match now.because {
                Some(because) => format!("{because}: {outcome}"),
                None => outcome,
            };
            let (at, lines) = (clock::now_text(), now.told.lines());
            state.last = Some(Ended { about, at, found, outcome: outcome.clone(), has_report, lines });
            outcome
        };
        // The desk has locks of its own, and looks at us behind them.
        let id = admin.page.note(format!("diagnosis of {model}"));
        let told = if found { Outcome::Done(outcome.clone()) } else { Outcome::Failed(outcome.clone()) };
        admin.page.note_outcome(id, told);
        let kind = EventKind::Diagnosed { found, outcome, report };
        admin.fleet.tell_of_request(Some(&model), None, kind);
    }
}

/// The name of a report that is made now: of the model, as far as that can stand in a name, and of the time.
fn report_name(model: &str, now: &str) -> String {
    let time: String = now.chars().filter(char::is_ascii_digit).collect();
    let (day, hour) = time.split_at_checked(8).unwrap_or((&time, ""));
    let plain: String = reports::plain(model).chars().take(100).collect();
    format!("{plain}-{day}-{hour}.html")
}

/// What reports say is the operator's alone.
fn make_folder(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

/// A report that was begun and not written is none. Whether there is one.
fn discard_empty(path: &Path) -> bool {
    match std::fs::symlink_metadata(path) {
        Ok(facts) if facts.len() == 0 => {
            drop(std::fs::remove_file(path));
            false
        }
        Ok(facts) => facts.is_file(),
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_named_by_model_and_time_whatever_the_model_is_called() {
        assert_eq!(report_name("qwen", "2026-01-02T03:04:05Z"), "qwen-20260102-030405.html");
        assert_eq!(report_name("../a b/<x>", "2026-01-02T03:04:05Z"), "_a_b__x_-20260102-030405.html");
    }

    #[test]
    fn what_was_begun_and_not_written_is_no_report() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.html");
        assert!(!discard_empty(&path));
        std::fs::write(&path, "").unwrap();
        assert!(!discard_empty(&path) && !path.exists());
        std::fs::write(&path, "x").unwrap();
        assert!(discard_empty(&path) && path.exists());
    }

    #[tokio::test]
    async fn where_no_process_can_be_made_none_is_begun_and_none_can_be_ended() {
        let (admin, _dir) = crate::admin::answer::tests::admin().await;
        let own = admin.diagnoses.clone();
        let refused = own.begin(&admin, &ModelName::new("m"), None, "a test").await.unwrap_err();
        assert!(refused.to_string().contains("no processes"), "{refused}");
        assert!(own.end("m", "a test").is_err());
        assert_eq!(own.view(), View::default());
    }
}
