//! In drop-in mode, a failed first start ends llama-warden, as it would end llama-server. The program that
//! started llama-warden expects this end, and a retry cannot help against a wrong flag or file. Once a
//! process was ready, its model is restarted after each failure. This module only observes.

use tokio::sync::watch;
use warden_supervisor::{BackendFailure as StartFailure, FailureKind};
use warden_supervisor::{FleetView, ModelState};

use crate::exit::CommandError;
use crate::logging;

/// Resolves when the first process has ended before it was ready. Never resolves once a process was ready.
pub(crate) async fn first_start_failure(
    mut views: watch::Receiver<std::sync::Arc<FleetView>>,
) -> CommandError {
    loop {
        match start_outcome(&views.borrow_and_update()) {
            FirstStart::Pending => {}
            FirstStart::Failed(failure) => return to_failure(&failure),
            FirstStart::Ready => break,
        }
        if views.changed().await.is_err() {
            break;
        }
    }
    std::future::pending().await
}

enum FirstStart {
    Pending,
    Ready,
    Failed(StartFailure),
}

fn start_outcome(view: &FleetView) -> FirstStart {
    // `was_ready` also covers a model whose process was ready and then failed.
    let up = |state: ModelState| matches!(state, ModelState::Loaded | ModelState::Draining);
    if view.models.iter().any(|model| up(model.state) || model.was_ready) {
        return FirstStart::Ready;
    }
    let failure = view.models.iter().find_map(|model| model.last_failure.as_ref());
    // An address failure means that another program took the port meanwhile, so a retry may help.
    match failure.filter(|failure| failure.kind != FailureKind::Address) {
        Some(failure) => FirstStart::Failed(failure.clone()),
        None => FirstStart::Pending,
    }
}

fn to_failure(failure: &StartFailure) -> CommandError {
    // Do not repeat lines that are in the log.
    let lines = if logging::shows_children() { &[][..] } else { &failure.lines };
    let lines = lines.iter().fold(String::new(), |all, line| all + "\n  | " + line);
    CommandError::hinted(
        format!("llama-server did not start: {}{lines}", failure.message),
        "as a drop-in, llama-warden ends with a first start that fails, as llama-server does; with a \
         configuration file it keeps trying",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use warden_policies::ModelName;
    use warden_supervisor::ModelView;

    fn view(state: ModelState, was_ready: bool, kind: Option<FailureKind>) -> FleetView {
        let failure =
            |kind| StartFailure { kind, message: "no".into(), lines: vec!["x".into()], failures: 1 };
        let model = ModelView {
            state,
            was_ready,
            last_failure: kind.map(failure),
            ..ModelView::unloaded(ModelName::new("m"))
        };
        FleetView { number: 1, models: vec![Arc::new(model)], ..FleetView::default() }
    }

    #[test]
    fn only_a_first_start_that_fails_by_itself_ends_us() {
        use FailureKind::{Address, BadModel, Signal};
        let failed = |view: &FleetView| matches!(start_outcome(view), FirstStart::Failed(_));
        assert!(failed(&view(ModelState::Backoff, false, Some(BadModel))));
        assert!(failed(&view(ModelState::Failed, false, Some(Signal))));
        assert!(!failed(&view(ModelState::Backoff, false, Some(Address))), "tried again");
        assert!(!failed(&view(ModelState::Loading, false, None)));
        let up = |view: &FleetView| matches!(start_outcome(view), FirstStart::Ready);
        assert!(up(&view(ModelState::Loaded, true, None)));
        assert!(up(&view(ModelState::Backoff, true, Some(Signal))), "it was up before");
    }

    #[test]
    fn what_llama_server_said_last_is_told_with_it() {
        let FirstStart::Failed(failure) =
            start_outcome(&view(ModelState::Backoff, false, Some(FailureKind::Exit)))
        else {
            panic!("no failure");
        };
        let lines = to_failure(&failure).lines().join("\n");
        assert!(lines.starts_with("error: llama-server did not start: no\n  | x\nhint: "), "{lines}");
        assert_eq!(to_failure(&failure).code(), 1);
    }
}
