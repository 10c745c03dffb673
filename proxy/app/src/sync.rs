//! Locks a mutex even if it is poisoned. Each step on our counters, queues and displayed data leaves them
//! consistent, and refusing the lock would end tasks that have nothing to do with the panic.

use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
