/* The folders that sandboxes stack: roots, and what earlier sandboxes wrote. They are mounts in `../layers`. */
#ifndef GOALY_LAYERS_H
#define GOALY_LAYERS_H

#include <stdint.h>

/* Keep a folder of the host, or a snapshot's (its path is NULL), by a name, for the client that was `born`. -1 with errno. */
int layer_add(const char *name, const char *path, int snapshot, uint32_t born, int first_id);
/* -1 with errno. Sandboxes that have it keep it. */
int layer_forget(const char *name);
void layers_forget_of(uint32_t born);

#endif
