//! Reloads a renewed certificate while the program serves: checks its files every few seconds, and reads
//! them at SIGHUP. An invalid certificate is logged and ignored, and never ends the program.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use warden_gateway::{CertificateInfo, GatewayGauges, TlsError, TlsState};
use warden_supervisor::{WorkKind, run_job};

pub(crate) async fn watch_certificate(
    tls: Arc<TlsState>,
    gauges: Arc<GatewayGauges>,
    every: Duration,
    warn: Duration,
    stop: CancellationToken,
) {
    let mut told = false;
    loop {
        let left = tls.certificate().left();
        gauges.tls_not_after.store(tls.certificate().not_after, Ordering::Relaxed);
        // Warn once for each certificate.
        if let Some(left) = left.filter(|left| *left < warn) {
            if !told {
                let days = left.as_secs() / 86_400;
                tracing::warn!(target: "tls", days, "the certificate {} expires soon; is its renewal at \
                                                     work?", tls.files().cert.display());
            }
            told = true;
        } else {
            told = false;
        }
        tokio::select! {
            () = tokio::time::sleep(every) => {}
            () = stop.cancelled() => return,
        }
        let looking = tls.clone();
        if let Ok(Some(result)) = run_job(WorkKind::Configuration, move || looking.reload_if_changed()).await
        {
            log_reload(&tls, result);
        }
    }
}

pub(crate) async fn reload_certificate(tls: &Arc<TlsState>) {
    let reading = tls.clone();
    match run_job(WorkKind::Configuration, move || reading.reload()).await {
        Ok(result) => log_reload(tls, result),
        // A retry is not needed here, because the files are checked again every few seconds.
        Err(error) => {
            tracing::error!(target: "tls", %error, "the certificate was not read; the one in use stays");
        }
    }
}

fn log_reload(tls: &TlsState, result: Result<CertificateInfo, TlsError>) {
    match result {
        Ok(certificate) => {
            let days = certificate.left().map(|left| left.as_secs() / 86_400);
            tracing::info!(target: "tls", days, "the certificate {} was read again", tls.files().cert.display());
        }
        Err(error) => tracing::error!(target: "tls", "{error}; the certificate in use stays"),
    }
}
